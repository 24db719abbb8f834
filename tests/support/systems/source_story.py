"""What the two halves of the source's story share: a running system whose device obeys files in a folder, requests in
the form that the source's documents print, and what answers and logs must say.
"""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from websockets.sync.client import connect

from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.tensors import decode_tensor
from blockrelay_launcher.drill.system import children_of, environment_of
from tests.support.logs import entries
from tests.support.systems.device_processes import child_of
from tests.support.systems.up_process import COMMAND, UpProcess
from tests.support.waiting import wait_until


@dataclass(kw_only=True)
class Story:
    """A running system, the id of its device, the folder whose files the device obeys, and which class has each block
    while nothing fails. `tolerance`: how far a row of logits may be from the undisturbed one, as a part of its length.
    """

    up: UpProcess
    gpu: str
    faults: Path
    client: httpx.Client
    plan_in_force: Mapping[str, str]
    tolerance: float
    sessions: int = field(default=0)

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """The device has it while the block runs."""
        (self.faults / name).touch()
        try:
            yield
        finally:
            (self.faults / name).unlink(missing_ok=True)

    def wait_until_healthy(self) -> None:
        """Returns when the plan has the device again; a driver on a CPU may compile its shaders for minutes."""
        wait_until(self.healthy, "the plan has come back to the device", timeout_s=60 if self.gpu == "cpu" else 300)

    @property
    def blocks(self) -> list[str]:
        """All of them, in order."""
        return list(self.plan_in_force)

    def on(self, device: str) -> list[str]:
        """The blocks of a class, CPU or GPU."""
        return [block for block, name in self.plan_in_force.items() if name == device]

    def plan(self) -> dict[str, Any]:
        return self.client.get("/v1/plan").json()

    def device(self) -> int:
        """The pid of the device's process."""
        return child_of(self.gpu_worker())

    def gpu_worker(self) -> int:
        workers = self.up.pid_of("-m blockrelay_worker")
        (worker,) = (pid for pid in workers if environment_of(pid).get("BLOCKRELAY_GPU") == self.gpu)
        return worker

    def step(
        self, tokens: Sequence[int], *, session: str = "", number: int = 1, past: int = 0, logits: str = "last"
    ) -> dict[str, Any]:
        """Step `number` of a session that has `past` tokens, by HTTP; the first one of a new session where none is
        named."""
        body = tensor_request(session or self.session(), tokens, number, past) | {"logits": logits}
        return self.client.post("/v1/infer", json=body).json()

    def session(self) -> str:
        self.sessions += 1
        return f"chat_{self.sessions:03}"

    def logged(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """What workers have written of an event: those entries that have these top-level fields."""
        assert self.up.data is not None
        logs = sorted((self.up.data / "logs").glob("*worker*.log"))
        found = [entry for log in logs for entry in entries(log, event)]
        return [entry for entry in found if all(entry.get(name) == value for name, value in fields.items())]

    def scoped(self, session: str) -> str:
        """The name of a session in logs, which carry the tenant's before it."""
        (name,) = {
            entry["session_id"]
            for entry in self.logged("BLOCK_EXECUTION_FALLBACK")
            if str(entry.get("session_id", "")).endswith(session)
        }
        return name

    def healthy(self) -> bool:
        return self.plan().get("plan") == self.plan_in_force

    def assert_close(self, found: NDArray[np.float64], right: NDArray[np.float64]) -> None:
        """Rows of logits are those of the undisturbed system, within the tolerance."""
        assert np.isfinite(found).all()
        off = np.linalg.norm(found - right, axis=1) / np.linalg.norm(right, axis=1)
        assert off.max() < self.tolerance, off

    def assert_fell_back(self, answer: dict[str, Any], session: str, blocks: list[str], reason: str, code: str) -> None:
        """One event for the one stage of the device that failed, as its worker has logged it."""
        (event,) = answer["fallback_events"]
        assert (event["block_id"], event["blocks"]) == (blocks[0], blocks)
        assert (event["from"], event["to"], event["success"]) == ("GPU", "CPU", True)
        assert (event["reason"], event["error_code"]) == (reason, code)
        stats = answer["execution_stats"]
        assert (stats["total_fallbacks"], stats["successful_fallbacks"]) == (1, 1)
        (entry,) = self.logged("BLOCK_EXECUTION_FALLBACK", session_id=self.scoped(session))
        assert entry["data"]["reason"] == reason and entry["data"]["blocks"] == blocks
        assert list(answer["execution_times"]) == self.blocks

    def assert_left_the_device(self, answer: dict[str, Any], session: str, reason: str, code: str) -> None:
        """The stage of the device fell back before it had computed anything."""
        self.assert_fell_back(answer, session, self.on("GPU"), reason, code)
        stats = answer["execution_stats"]
        assert stats["gpu_blocks_executed"] == 0 and stats["cpu_blocks_executed"] >= len(self.blocks)

    def assert_a_cpu_computes_what_is_not_finite(
        self, tokens: Sequence[int], right: NDArray[np.float64], block: str = ""
    ) -> None:
        """The device gives NaN once, in `block` where it runs ONNX blocks as they are, and serves on."""
        device, session = self.device(), self.session()
        (self.faults / "nan").write_text(block)
        answer = self.step(tokens, session=session)
        assert not (self.faults / "nan").exists(), "the device has had it"
        self.assert_close(logits(answer), right)
        self.assert_left_the_device(answer, session, "gpu_wrong_numbers", "INTERNAL")
        again = self.step(tokens)
        assert again["fallback_events"] == [] and self.device() == device, "its canary was right: it serves on"

    def assert_a_cpu_computes_what_has_no_room(self, tokens: Sequence[int], right: NDArray[np.float64]) -> None:
        """The device is out of memory for a while, and serves on."""
        device, session = self.device(), self.session()
        with self.fault("oom"):
            answer = self.step(tokens, session=session)
        self.assert_close(logits(answer), right)
        self.assert_left_the_device(answer, session, "gpu_memory_error", "OOM")
        again = self.step(tokens)
        assert again["fallback_events"] == [] and self.device() == device

    def answers_while_the_device_dies(
        self, prompts: Sequence[str | list[int]], new: int, *, times: int
    ) -> list[dict[str, Any]]:
        """Greedy answers of all prompts at once. The device's process is killed in their middle, and then again while
        it loads; CPUs do its part until it is there."""
        worker, begun, killed = self.gpu_worker(), threading.Semaphore(0), list[int]()
        with ThreadPoolExecutor(len(prompts)) as pool, self.fault("load"):
            asked = [pool.submit(self.streamed, prompt, new, begun) for prompt in prompts]
            for _ in prompts:
                assert begun.acquire(timeout=60)
            for _ in range(times):
                killed.append(child_of(worker))
                os.kill(killed[-1], signal.SIGKILL)
                wait_until(lambda: set(self.plan()["plan"].values()) == {"CPU"}, "the plan has gone to the CPU")
                wait_until(
                    lambda: [c for c in children_of(worker) if c not in killed], "the device comes back, and loads"
                )
            answers = [one.result(timeout=120) for one in asked]
            assert set(self.plan()["plan"].values()) == {"CPU"}, "a device that loads serves nobody"
        return answers

    def assert_went_on(
        self, answers: Sequence[dict[str, Any]], new: int, encode: Callable[[Any], Sequence[int]]
    ) -> None:
        """Each has all its tokens, each of them the right one, and says as its worker's log what became of the device;
        most were on it when it died. `encode` makes tokens of prompts."""
        on_gpu, moved = self.on("GPU"), 0
        for answer in answers:
            assert len(answer["outputs"]["token_ids"]) == new
            self.assert_greedy(encode(answer["prompt"]), answer["outputs"]["token_ids"])
            stats = answer["execution_stats"]
            assert stats["gpu_blocks_executed"] + stats["cpu_blocks_executed"] >= len(self.blocks) * new
            assert stats["total_fallbacks"] == stats["successful_fallbacks"] == len(answer["fallback_events"]) <= 1
            logged = self.logged("BLOCK_EXECUTION_FALLBACK", request_id=own_id(answer["request_id"]))
            assert len(logged) == len(answer["fallback_events"])
            for event, entry in zip(answer["fallback_events"], logged, strict=True):
                moved += 1
                assert event["block_id"] == on_gpu[0] and event["blocks"] == on_gpu
                assert (event["from"], event["to"], event["success"]) == ("GPU", "CPU", True)
                assert (event["reason"], event["error_code"]) == ("gpu_device_lost", "INTERNAL")
                assert entry["data"]["reason"] == event["reason"] and entry["data"]["blocks"] == event["blocks"]
                assert 0 < event["position"] < new and stats["gpu_blocks_executed"] >= len(on_gpu) * event["position"]
                assert stats["gpu_blocks_executed"] % len(on_gpu) == 0
        assert moved >= len(answers) // 2, "most were on the device when it died"

    def streamed(self, prompt: str | list[int], new: int, begun: threading.Semaphore) -> dict[str, Any]:
        """One greedy answer of `new` tokens by WebSocket, of which `begun` hears when it is under way; its last
        object."""
        request = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
        with connect(self.up.url.replace("http", "ws")) as socket:  # the source's clients name no path
            socket.send(json.dumps(request))
            tokens = 0
            while True:
                told = json.loads(socket.recv(timeout=120))
                assert told["status"] in ("accepted", "token", "success"), told
                if told["status"] == "success":
                    return told | {"prompt": prompt}
                tokens += told["status"] == "token"
                if tokens == 3 and told["status"] == "token":
                    begun.release()

    def assert_greedy(self, prompt: Sequence[int], new: Sequence[int]) -> None:
        """Every token is the best one, within the tolerance, by the logits of the undisturbed system behind the same
        tokens."""
        rows = logits(self.step([*prompt, *new[:-1]], logits="all"))[len(prompt) - 1 :]
        behind = rows.max(axis=1) - rows[np.arange(len(new)), list(new)]
        assert (behind <= self.tolerance * np.linalg.norm(rows, axis=1)).all(), behind


def tensor_request(session: str, tokens: Sequence[int], step: int = 1, past: int = 0) -> dict[str, Any]:
    count = len(tokens)
    return {
        "session_id": session,
        "step": step,
        "input_tensors": {
            "input_ids": {"_tensor_": True, "dtype": "int64", "shape": [1, count], "data": list(tokens)},
            "attention_mask": {"_tensor_": True, "data": [1] * (past + count)},
            "position_ids": {"_tensor_": True, "data": list(range(past, past + count))},
        },
    }


def logits(answer: dict[str, Any], row: int = 0) -> NDArray[np.float64]:
    """[rows, vocabulary] of one request of the answer."""
    assert answer["status"] == "success", answer
    tensor = decode_tensor(answer["outputs"]["logits"], param="logits", max_elements=1 << 24)
    return np.asarray(tensor[row], np.float64)


def command(*arguments: str) -> str:
    """stdout of a `blockrelay` command that succeeds."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
