"""What the two halves of the source's story share: a running system whose device obeys files in a folder, requests in
the form that the source's documents print, and what answers and logs must say.
"""

import json
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from websockets.sync.client import connect

from blockrelay.protocol.tensors import decode_tensor
from tests.support.systems.device_processes import child_of
from tests.support.systems.up_process import COMMAND, UpProcess


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
        (worker,) = (
            pid for pid in self.up.pid_of("-m blockrelay_worker") if f"BLOCKRELAY_GPU={self.gpu}" in environment(pid)
        )
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
        found: list[dict[str, Any]] = []
        for log in sorted((self.up.data / "logs").glob("*worker*.log")):
            for line in log.read_text().splitlines():
                entry = json.loads(line)
                if entry["event_type"] == event and all(entry.get(name) == value for name, value in fields.items()):
                    found.append(entry)
        return found

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


def environment(pid: int) -> list[str]:
    return (Path("/proc") / str(pid) / "environ").read_bytes().decode().split("\0")


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
