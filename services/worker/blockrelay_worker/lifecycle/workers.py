"""The workers of this process: one, or one for each stage on its device, which they share."""

import sys
import threading
import time
from dataclasses import replace

from blockrelay.block_folder.draft_folder import open_draft
from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.other_precisions import open_precisions
from blockrelay.errors import BlockrelayError, DeviceFailed, DeviceLost, KnownAnswerMismatch, UsageError
from blockrelay.exit_codes import BROKEN, complain, exit_code
from blockrelay.observability.logs import get
from blockrelay.protocol.plan import GPU
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.cpu.shared_loading import SharedExecutors
from blockrelay_worker.execution.loader import Executors, executors_for, gpu_of
from blockrelay_worker.execution.process.executors import DeviceExecutors
from blockrelay_worker.execution.process.renewal import opened_again_in_s
from blockrelay_worker.lifecycle.device.next_device import OtherDevices
from blockrelay_worker.lifecycle.worker import Worker
from blockrelay_worker.transport.redis_links import WorkerDrain


class Workers:
    """Runs all workers of this process. If one fails, all end, and its error becomes the exit code of the process."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._ends = [(threading.Event(), WorkerDrain()) for _ in range(settings.gpu_stages)]
        self._failed = threading.Lock()
        self._code = 0
        self._executors: Executors | None = None

    def end(self) -> None:
        """Ends the workers; called by signal handlers, in the main thread.

        On the first call, workers that serve take no new requests and have `drain_s` seconds to finish. Workers that
        do not serve, and all on the second call, end at once, even while their device loads a stage. Raises
        SystemExit(0) while the device is still being opened.
        """
        if self._executors is None:
            raise SystemExit(0)  # the device is still being opened
        drained: list[threading.Event] = []
        for stop, drain in self._ends:
            if drain.is_possible and not drain.is_requested and self._settings.drain_s > 0:
                drain.is_requested = True
                drained.append(stop)
            else:
                stop.set()
        if drained:
            timer = threading.Timer(self._settings.drain_s, self._stop, [drained])  # also if an engine waits for Redis
            timer.daemon = True
            timer.start()
        self._stop([])

    def run(self) -> int:
        """Runs all workers and returns the exit code of the process once they have ended; 0 if none failed.

        The first error is reported on stderr. Raises OSError if the Python of the device's process cannot be started.
        """
        try:
            workers = self._made()
        except BlockrelayError as error:
            self._fail(error, exit_code(error))
            return self._code
        threads = [
            threading.Thread(target=self._run, args=(worker,), name=f"worker {number}")
            for number, worker in enumerate(workers[1:], 2)
        ]
        for thread in threads:
            thread.start()
        self._run(workers[0])
        for thread in threads:
            thread.join()
        return self._code

    def _made(self) -> list[Worker]:
        """Opens the device and makes its workers. Raises UsageError or BlockFolderError if no start can succeed."""
        settings = self._settings
        folder = open_block_folder(settings.model, blocks=[])
        as_they_are = folder.model.onnx_blocks is not None and settings.imported_model is None
        if settings.gpu_stages > 1 and not settings.gpu and not as_they_are:
            raise UsageError("--gpu-stages is for workers with --gpu: without one, start a process for each stage")
        if settings.tensor_parallel > 1 and (settings.device == GPU or folder.model.onnx_blocks is not None):
            raise UsageError("tensor_parallel is for workers on CPUs: leave it out with a GPU and with ONNX files")
        if settings.draft_model is not None and settings.device == GPU:
            raise UsageError("draft_model is for workers on CPUs: leave it out here, or --gpu")
        draft = None if settings.draft_model is None else open_draft(settings.draft_model, folder)
        others = OtherDevices(
            settings.gpu, settings.gpu_fallbacks if settings.gpu else "", python=settings.gpu_python or sys.executable
        )
        folders = open_precisions(folder, settings.other_folders)
        executors = self._executors = self._opened(folders, others)
        workers: list[Worker] = []
        for number, (stop, drain) in enumerate(self._ends):
            port = settings.port and settings.port + number
            own = settings.model_copy(update={"port": port})
            workers.append(Worker(own, folders, executors, stop, drain, number=number, others=others, draft=draft))
        return workers

    def _opened(self, folders: tuple[BlockFolder, ...], others: OtherDevices) -> Executors:
        """Returns executors on the GPU of the settings, on one of the `others` if it cannot do its work, or on CPUs.

        They can run stages of the first folder, and of the others unless their device refuses these.

        A GPU that exists and cannot be used is tried until it can be. Meanwhile this process registers no worker, and
        CPU workers take its requests. Raises UsageError if the GPU does not exist.
        """
        settings, failures = self._settings, 0
        folder, *more = folders
        while True:
            try:
                gpu = gpu_of(settings, folder)
                if gpu is not None and settings.gpu:
                    return others.opened(
                        lambda device, gpu=gpu: DeviceExecutors(folder, replace(gpu, device=device), others=more)
                    )
                return executors_for(
                    folder,
                    threads=settings.threads,
                    gpu=gpu,
                    imported=settings.imported_model,
                    ranks=settings.tensor_parallel,
                    others=more,
                )
            except (DeviceLost, DeviceFailed, KnownAnswerMismatch, UsageError) as error:
                # A GPU that has vanished since the first try may come back too.
                if not settings.gpu or (isinstance(error, UsageError) and not failures):
                    raise
                failures += 1
                retry_s = opened_again_in_s(failures)
                get().error("DEVICE_UNUSABLE", device=settings.gpu, error=str(error), retry_s=retry_s)
                time.sleep(retry_s)  # a signal ends it

    def _run(self, worker: Worker) -> None:
        try:
            worker.run()
        except BlockrelayError as error:
            self._fail(error, BROKEN if worker.has_served else exit_code(error))
        self._stop([])

    def _fail(self, error: BlockrelayError, code: int) -> None:
        """Reports the first error, sets the exit code and ends all workers at once."""
        with self._failed:
            if not self._code:
                self._code = code
                complain(error)
        self._stop([stop for stop, _ in self._ends])

    def _stop(self, stops: list[threading.Event]) -> None:
        """Sets these events. When no worker serves or will serve, it also ends a load by a device or by ranks."""
        for stop in stops:
            stop.set()
        over = all(stop.is_set() and not drain.is_possible for stop, drain in self._ends)
        if over and isinstance(self._executors, (DeviceExecutors, SharedExecutors)):
            self._executors.abandon()
