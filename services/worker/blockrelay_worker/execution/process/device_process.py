"""The worker's side of the process that owns a device: it answers requests in time, or it is killed."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, cast

from blockrelay.errors import BlockFolderError, DeviceFailed, DeviceLost, KnownAnswerMismatch, UsageError
from blockrelay.observability.logs import get
from blockrelay_worker.execution.process.frames import GOES_ON, Message, PipeClosed, read, write
from blockrelay_worker.policy import DEVICE_END_S, DEVICE_POLL_S

CHILD = "blockrelay_worker.execution.process"
#: The reason of a DeviceLost when the worker itself closed the process.
CLOSED = "closed"


def _nothing() -> None:
    """Does nothing: the default for callbacks."""


class DeviceProcess:
    """A child process that runs from construction until it is `lost` or closed. Any thread may ask; one request at a
    time is answered.

    `when_lost` holds callbacks, called once, from any thread, when the process is lost (not when it is closed). Add
    them before that, each under a key of its owner. They run while a request holds the process: a callback that calls
    `ask`, `give_up` or `retire` never returns.

    An answer that takes longer than its limit ends the process (SIGKILL): when a driver hangs, nothing inside the
    process can end it.
    """

    def __init__(self, device: str, *, python: str = sys.executable, module: str = CHILD) -> None:
        """Starts `python -m module`. `python` has the packages of the device's provider; `device` names it in errors
        and logs. Raises OSError if the process cannot be started."""
        self.device = device
        self._asking = threading.Lock()
        self._deadline: float | None = None
        self._too_long: float | None = None
        self._closed = threading.Event()
        #: Why the process is gone; None while it runs.
        self.lost: DeviceLost | None = None
        self.when_lost: dict[object, Callable[[], None]] = {}
        start: Future[subprocess.Popen[bytes]] = Future()
        command = [python, "-P", "-m", module, str(os.getpid())]
        threading.Thread(target=self._host, args=(command, start), name="device-watch", daemon=True).start()
        self._process = start.result()

    @property
    def pid(self) -> int:
        """The id of the child process."""
        return self._process.pid

    def ask(
        self,
        message: Message,
        *,
        limit_s: float,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_progress: Callable[[], None] = _nothing,
    ) -> Message:
        """Sends `message` and returns the answer. `limit_s` counts from the moment when earlier requests are answered;
        `waiting` is entered while this one waits for them. When the process sends GOES_ON, `on_progress` is called and
        the limit starts again.

        Raises DeviceFailed when the request failed and the process still runs; DeviceLost when the process is gone, and
        always from then on; KnownAnswerMismatch for a stage with wrong numbers; UsageError or BlockFolderError for what
        this device or folder will never do.
        """
        with waiting():
            self._asking.acquire()
        try:
            if self.lost is not None:
                raise DeviceLost(str(self.lost), reason=self.lost.reason, code=self.lost.code, block=self.lost.block)
            self._deadline = time.monotonic() + limit_s
            try:
                write(cast(Any, self._process.stdin), message)
                while (answer := read(cast(Any, self._process.stdout))).kind == GOES_ON:
                    self._deadline = time.monotonic() + limit_s
                    on_progress()
            except (PipeClosed, OSError) as error:
                raise self._gone(limit_s) from error
            finally:
                self._deadline = None
            return self._checked(answer)
        finally:
            self._asking.release()

    def give_up(self, lost: DeviceLost) -> DeviceLost:
        """Ends the process for a reason that it did not report itself, after the request that it is working on. Returns
        the loss: `lost`, or an earlier one."""
        with self._asking:
            if self.lost is None:
                self._lose(lost)
        assert self.lost is not None
        return self.lost

    def retire(self) -> None:
        """Closes the process after the request that it is working on."""
        with self._asking:
            self.close()

    def abandon(self) -> None:
        """Kills the process at once, whatever it does. A thread that waits for its answer gets DeviceLost
        (`closed`)."""
        if self.lost is None:
            self.lost = DeviceLost(f"the process of {self.device} was closed", reason=CLOSED, code="INTERNAL")
        self._closed.set()
        self._process.kill()

    def close(self) -> None:
        """Ends the process and waits for that. No other thread may be asking it anything."""
        if self.lost is None:
            self.lost = DeviceLost(f"the process of {self.device} was closed", reason=CLOSED, code="INTERNAL")
        self._closed.set()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                cast(Any, pipe).close()
        try:
            self._process.wait(DEVICE_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _checked(self, answer: Message) -> Message:
        """Returns the answer, or raises the error that it stands for."""
        fields: Mapping[str, Any] = answer.fields
        if answer.kind == "refused":
            if fields["type"] == KnownAnswerMismatch.__name__:
                raise KnownAnswerMismatch(fields["text"], block=fields["block"])
            raise (BlockFolderError if fields["type"] == BlockFolderError.__name__ else UsageError)(fields["text"])
        if answer.kind != "failed":
            return answer
        about = {"reason": fields["reason"], "code": fields["code"], "block": fields["block"]}
        if fields["class"] == "device":
            self._lose(DeviceLost(f"{self.device}: {fields['text']}", **about))
            assert self.lost is not None
            raise self.lost
        capacity = fields["class"] == "capacity"
        seconds = fields.get("seconds")
        raise DeviceFailed(f"{self.device}: {fields['text']}", capacity=capacity, seconds=seconds, **about)

    def _gone(self, limit_s: float) -> DeviceLost:
        """Returns why the process ended: by its deadline, or by itself. Makes sure that it has."""
        self._process.kill()
        status = self._process.wait()
        if self.lost is not None:  # another thread has abandoned the process
            return self.lost
        if self._too_long is not None:
            lost = DeviceLost(
                f"{self.device} gave no answer for {limit_s:g} s: its process was ended", reason="hang", code="TIMEOUT"
            )
        else:
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            lost = DeviceLost(f"the process of {self.device} has ended {how}", reason="process_ended", code="INTERNAL")
        self._lose(lost)
        return lost

    def _lose(self, lost: DeviceLost) -> None:
        """Notes the loss, closes the process and calls `when_lost`."""
        self.lost = lost
        self.close()
        get().error("DEVICE_LOST", device=self.device, reason=lost.reason, code=lost.code, error=str(lost))
        for tell in list(self.when_lost.values()):
            tell()

    def check(self) -> None:
        """Raises DeviceLost if the process is known to be gone."""
        if self.lost is not None:
            raise self.lost

    def _host(self, command: list[str], start: "Future[subprocess.Popen[bytes]]") -> None:
        """Starts the process and watches it until it has ended. Linux kills it when the thread that started it ends, so
        that thread must be none of those that ask."""
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except BaseException as error:  # noqa: BLE001 the constructor raises it
            start.set_exception(error)
            return
        start.set_result(process)
        while not self._closed.wait(DEVICE_POLL_S):
            if process.poll() is not None and self._asking.acquire(blocking=False):
                try:  # no thread asks it anything, so no other one would notice
                    if self.lost is None:
                        self._gone(0.0)
                finally:
                    self._asking.release()
                return
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self._too_long = deadline
                process.kill()
                break
        process.wait()
