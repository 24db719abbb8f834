"""The process that owns a device and does what its worker asks on stdin.

    open   the device and the folders         -> of each the numerics id of its stages, and the memory that they take
    load   a folder's blocks, and KV pages    -> a stage
    run, export, import, close of a stage     -> what the executor returns
    first_not_finite of a stage               -> the block that made NaN or infinity, and seconds of the blocks up to it
    canary of a stage                         -> done, if it still computes what it computed when it was loaded
    clean_up of a stage                       -> done, when it has given back what it kept for later steps

One thread uses the device. Another one reads, and ends the process at once when the pipe ends: when a worker dies, the
process of its device dies too, whatever the driver does meanwhile. A failure is answered with `failed`, and with the
kind of failure that the provider's text stands for; with `refused` and the type of the error where the cause is the
folder, the installation or wrong known answers. Before the answer to something of many parts, such as a step of
ONNX blocks, the process may send GOES_ON, which extends the time limit.
"""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, TypeVar

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.errors import BlockFolderError, BlockrelayError, ExecutionError, KnownAnswerMismatch, UsageError
from blockrelay.exit_codes import BROKEN
from blockrelay.host.memory import resident_bytes
from blockrelay.observability import logs
from blockrelay.protocol.plan import Stage
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.onnx.as_is.answers import Known
from blockrelay_worker.execution.onnx.as_is.loading import AsIsExecutors, room_for_sessions
from blockrelay_worker.execution.onnx.as_is.stage import AsIsStage
from blockrelay_worker.execution.onnx.as_is.warm_blocks import WarmLimits
from blockrelay_worker.execution.onnx.canary import Canary
from blockrelay_worker.execution.onnx.compiled.graphs import compiled_graphs
from blockrelay_worker.execution.onnx.failures import Judge
from blockrelay_worker.execution.onnx.known_answers import PAGES_NEEDED
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.onnx.providers.provider import Provider
from blockrelay_worker.execution.onnx.stage import OnnxStage
from blockrelay_worker.execution.onnx.tries import TRIES, Tries, TryLimits
from blockrelay_worker.execution.process.frames import GOES_ON, Message, PipeClosed, read, write
from blockrelay_worker.execution.process.step_arrays import packed_rows, packed_tensors, unpacked_tensors
from blockrelay_worker.execution.selection import Need
from blockrelay_worker.policy import MEMORY_EVERY_S

T = TypeVar("T")
#: Least seconds between two messages GOES_ON.
GOES_ON_EVERY_S = 0.1


class Child:
    """Answers messages, one after the other, on one thread."""

    def __init__(self, goes_on: Callable[[], None]) -> None:
        """`goes_on` is called after each part of something that may take long."""
        self._goes_on, self._judge = goes_on, Judge()
        self._provider: Provider | None = None
        self._memory_at = float("-inf")
        self._executors: OnnxExecutors | AsIsExecutors | None = None
        self._stages: dict[int, OnnxStage | AsIsStage] = {}
        self._canaries: dict[int, Canary] = {}
        self._tries, self._retries = TRIES, 0

    def answer(self, message: Message) -> Message:
        """Does what `message` asks. Returns the result, `failed` or `refused`; raises nothing that a device can
        cause."""
        try:
            return self._do(message)
        except BlockrelayError as error:
            if message.kind == "canary" and isinstance(error, KnownAnswerMismatch):
                about = {"class": "device", "reason": "canary", "code": "INTERNAL", "block": error.block}
                return Message("failed", {"text": str(error), **about})
            if message.kind in ("run", "first_not_finite", "canary") or isinstance(error, ExecutionError):
                return self._failed(error)
            block = error.block if isinstance(error, KnownAnswerMismatch) else None
            return Message("refused", {"type": _type_of(error), "text": str(error), "block": block})
        except Exception as error:  # noqa: BLE001 ONNX Runtime's own exception types have no public common base
            return self._failed(error)

    def _failed(self, error: Exception) -> Message:
        """Returns the answer `failed`, with the kind of failure, the block, and the seconds of the blocks before it."""
        failure = self._judge.judge(str(error.__cause__ or error))
        block = getattr(error, "block", None) or failure.block
        fields = {"text": str(error), "class": failure.kind, "reason": failure.reason, "code": failure.code}
        return Message("failed", fields | {"block": block, "seconds": dict(getattr(error, "seconds", {}))})

    def _do(self, message: Message) -> Message:
        """Does what `message` asks and returns the answer. Raises what the stage or ONNX Runtime raises."""
        fields = message.fields
        match message.kind:
            case "open":
                return self._open(fields)
            case "load":
                return self._load(fields)
            case "run":
                return self._run(self._stages[fields["stage"]], message)
            case "first_not_finite":
                stage = self._stages[fields["stage"]]
                fault = stage.first_not_finite(_batch(stage, message))
                return Message("looked", {"block": "", "seconds": {}} if fault is None else asdict(fault))
            case "export":
                contents = self._stages[fields["stage"]].export_pages(fields["pages"])
                return Message("pages", arrays=[half for content in contents for layer in content for half in layer])
            case "import":
                halves, pages = message.arrays, fields["pages"]
                each = len(halves) // len(pages)
                contents = [
                    list(zip(halves[at : at + each : 2], halves[at + 1 : at + each : 2], strict=True))
                    for at in range(0, len(halves), each)
                ] if each else [[] for _ in pages]  # fmt: skip
                self._stages[fields["stage"]].import_pages(pages, contents)
                return Message("done")
            case "canary":
                self._canaries[fields["stage"]].check()
                return Message("done")
            case "clean_up":
                self._stages[fields["stage"]].clean_up()
                return Message("done")
            case "close":
                del self._canaries[fields["stage"]]
                self._stages.pop(fields["stage"]).close()
                return Message("done")
            case kind:
                raise AssertionError(f"nobody sends {kind}")

    def _open(self, fields: Mapping[str, Any]) -> Message:
        """Opens the device and the folders, without loading anything of them. Returns the device's name, and the
        numerics id of each folder with the memory that its stages take, or why the device never runs its stages. Raises
        the error for the first folder."""
        self._tries = TryLimits(*fields["tries"])
        # Drivers read the variables of their shader caches when the provider is opened.
        compiled = None if fields["cache"] is None else compiled_graphs(Path(fields["cache"]), os.environ)
        self._provider = open_provider(fields["device"])
        self._provider.compiled, self._provider.threads = compiled, fields["threads"]
        first, *others = (Path(folder) for folder in fields["folders"])
        opened = open_block_folder(first, blocks=[])
        executors = self._executors = (
            OnnxExecutors(self._provider, per_block=fields["per_block"], capture=False if fields["eager"] else None)
            if opened.model.onnx_blocks is None
            else AsIsExecutors(
                self._provider,
                warm=_warm(fields, self._provider),
                ran_block=self._goes_on,
                tries=self._tries,
            )
        )
        about = [_about(executors, opened)]
        for other in others:
            try:
                about.append(_about(executors, open_block_folder(other, blocks=[])))
            except (BlockFolderError, UsageError, KnownAnswerMismatch) as error:
                about.append({"refused": str(error)})
        return Message("opened", {"card": self._provider.card, "folders": about})

    def _load(self, fields: Mapping[str, Any]) -> Message:
        """Loads blocks `first..last` of `folder` with `pages` KV pages and some more for canaries. `budget`: bytes for
        all weights and pages on the device; None: unknown. Weights of closed stages stay in what the budget leaves;
        without a budget they stay until the next stage is loaded. Those of another folder do not stay."""
        assert self._executors is not None, "it was opened"
        executors, path, budget = self._executors, Path(fields["folder"]), fields["budget"]
        first, last, pages = fields["first"], fields["last"], fields["pages"] + PAGES_NEEDED
        opened = open_block_folder(path, blocks=[])
        here = executors.resident(opened, first, last)
        folder = open_block_folder(path, blocks=set(range(first, last + 1)) - here)
        pools = sum(stage.pool_bytes for stage in self._stages.values())
        pools += pages * executors.memory(opened).page_bytes(Stage(first=first, last=last))
        room = max(0, (budget or 0) - pools)

        def loaded() -> tuple[OnnxStage | AsIsStage, Known]:
            return executors.loaded(folder, first, last, pages=pages, weight_room=room)

        # Stages of ONNX blocks try each block again by themselves.
        stage, answers = loaded() if isinstance(executors, AsIsExecutors) else self._tried("a stage", loaded)
        number, pages = max(self._stages, default=0) + 1, stage.pool.pages - PAGES_NEEDED
        self._canaries[number] = Canary(
            stage, answers, first_page=pages, tolerance=executors.tolerance(folder.manifest)
        )
        self._stages[number] = stage
        able = stage.capabilities
        limits = {"max_rows": able.max_rows, "max_sequences": able.max_sequences}
        stage.moved_bytes()  # the bytes of its known answers belong to no step
        figures = (
            {"weight_bytes": stage.weight_bytes, "pool_bytes": stage.pool_bytes, "retries": self._new_retries()}
            | _recorded(stage)
            | self._memory()
        )
        answer = {"stage": number, "pages": pages, "details": dict(stage.details), "figures": figures}
        return Message("loaded", answer | limits)

    def _tried(self, what: str, work: Callable[[], T]) -> T:
        """Returns what `work` returns, after as many tries as the limits allow. Raises the error of the last one."""
        tries = Tries(self._tries, self._count_retry)
        while True:
            try:
                return work()
            except Exception as error:
                if not tries.again(error, what=what):
                    raise
                gc.collect()

    def _count_retry(self) -> None:
        self._retries += 1

    def _new_retries(self) -> int:
        """Returns the retries since the last call."""
        retries, self._retries = self._retries, 0
        return retries

    def _memory(self) -> dict[str, int]:
        """Returns the memory in use by this process and on the device, in bytes; empty if asked within a second."""
        now = time.monotonic()
        if now - self._memory_at < MEMORY_EVERY_S:
            return {}
        self._memory_at = now
        assert self._provider is not None, "it was opened"
        used, there = self._provider.memory() or (0, 0)
        return {"process_bytes": resident_bytes(), "memory_used_bytes": used, "memory_bytes": there}

    def _run(self, stage: OnnxStage | AsIsStage, message: Message) -> Message:
        """Runs a step. Returns its rows, logits or tensors, with its times and the figures of the device."""
        batch, as_is, began = _batch(stage, message), isinstance(stage, AsIsStage), time.perf_counter()
        output = stage.run(batch) if as_is else self._tried("a step", lambda: stage.run(batch))
        ran_s = time.perf_counter() - began
        up, down = stage.moved_bytes()
        about = {
            "not_finite": list(output.not_finite),
            "seconds": output.seconds,
            "estimated": output.estimated,
            "kv_s": output.kv_s,
            "ran_s": ran_s,
            "figures": {"up_bytes": up, "down_bytes": down, "retries": self._new_retries()}
            | _recorded(stage)
            | self._memory(),
        }
        if output.rows is not None:
            chosen, arrays = packed_rows(output.rows)
            return Message("ran", about | {"rows": chosen}, arrays)
        if output.tensors is not None:
            named, arrays = packed_tensors(output.tensors)
            return Message("ran", about | {"tensors": named}, arrays)
        result = output.logits if output.hidden is None else output.hidden
        assert result is not None
        return Message("ran", about, [result])


def _about(executors: OnnxExecutors | AsIsExecutors, folder: BlockFolder) -> dict[str, Any]:
    """Returns the numerics id of stages of the folder, and the fields of the `DeviceMemory` that they take. Raises what
    the executors raise for a folder whose stages they cannot run."""
    return {"numerics": executors.numerics_id(folder.manifest), "memory": asdict(executors.memory(folder))}


def _batch(stage: OnnxStage | AsIsStage, message: Message) -> Batch:
    """Returns the batch of a message. Its first array is tokens if tensors by name come with it or the stage has block
    1."""
    fields, (rows, *arrays) = message.fields, message.arrays
    tensors = unpacked_tensors(fields["tensors"], arrays)
    are_tokens = stage.takes_tokens or len(tensors) > 0
    return Batch(
        segments=[Segment(rows=count, first_position=first, pages=pages) for count, first, pages in fields["segments"]],
        tokens=rows if are_tokens else None,
        hidden=None if are_tokens else rows,
        tensors=tensors,
        wanted=fields["wanted"],
        needs=[need and Need(*need) for need in fields["needs"]],
    )


def _warm(fields: Mapping[str, Any], provider: Provider) -> WarmLimits:
    """Returns the limits of warm sessions that the worker set, or as many as the device's memory has room for."""
    sessions, size, fitting = fields["warm"]
    return WarmLimits(sessions, room_for_sessions(provider, fields["budget"]) if fitting else size)


def _recorded(stage: OnnxStage | AsIsStage) -> dict[str, Any]:
    """Returns counts of recorded steps, or of sessions that come and go; empty where the stage has neither."""
    if isinstance(stage, AsIsStage):
        counts = asdict(stage.blocks.counts)
        return {"grown": counts.pop("grown"), "sessions": counts, "weight_bytes": stage.weight_bytes}
    steps = stage.captured
    return {} if steps is None else {"repeated_steps": steps.repeated, "recording_failures": steps.failures}


def _type_of(error: BlockrelayError) -> str:
    """Returns the name of the error that the worker raises in place of `error`."""
    kinds = (KnownAnswerMismatch, BlockFolderError, UsageError)
    return next((kind.__name__ for kind in kinds if isinstance(error, kind)), BlockrelayError.__name__)


def _read_all(stream: BinaryIO, messages: "SimpleQueue[Message]") -> None:
    try:
        while True:
            messages.put(read(stream))
    except (PipeClosed, OSError):
        os._exit(0)


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Returns this process's ends of the pipes, and sends what libraries print to stderr: a printed line would be no
    valid message."""
    ours = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return ours


def main() -> int:
    """Answers messages. Ends with 0 when the pipe ends, with 70 after a failure that has lost the device."""
    logs.configure("WARNING", node_id=logs.node_name("device"))
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a terminal signals the whole group, but the worker decides when to end
        signal.signal(number, signal.SIG_IGN)
    requests, answers = _own_pipes()
    messages: SimpleQueue[Message] = SimpleQueue()
    threading.Thread(target=_read_all, args=(requests, messages), name="reader", daemon=True).start()
    reported_at = float("-inf")

    def goes_on() -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= GOES_ON_EVERY_S:
            write(answers, Message(GOES_ON))
            reported_at = time.monotonic()

    child = Child(goes_on)
    while True:
        answer = child.answer(messages.get())
        write(answers, answer)
        fields: Any = answer.fields
        if answer.kind == "failed" and fields["class"] == "device":
            return BROKEN
