"""Serves one stage under one registration: registers, loads the blocks, runs the engine, and leaves the registry."""

import gc
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Literal

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.errors import DeviceLost, ExecutionError
from blockrelay.host.identity import host_name
from blockrelay.observability.logs import get
from blockrelay.protocol.plan import DEVICES, Stage, is_served
from blockrelay.protocol.served_folder import folders_to_json
from blockrelay.redis.registry import read_workers
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_worker.engine.loop import OUT_OF_MEMORY, Engine
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.fault_injection import with_faults
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.kernels.libraries import shortcoming
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.lifecycle.changes.retirement import Retirement
from blockrelay_worker.lifecycle.changes.shortage import MemoryWatch, is_of_memory
from blockrelay_worker.lifecycle.changes.succession import Place, Succession
from blockrelay_worker.lifecycle.device.on_device import MOVED
from blockrelay_worker.lifecycle.heartbeat import Heartbeat
from blockrelay_worker.lifecycle.local_rows import open_local_rows
from blockrelay_worker.lifecycle.parts import WorkerParts
from blockrelay_worker.lifecycle.registration import Registration, StageAssignment
from blockrelay_worker.lifecycle.stage_parts import cache_of, care_of_ranks, readers_of, role_of
from blockrelay_worker.policy import DEVICE_PATIENCE, PAGES_FLUSH_S
from blockrelay_worker.sampling.row_sampler import sampler_of
from blockrelay_worker.scheduling.guesses import Guesser
from blockrelay_worker.states import WORKER, WorkerMachine
from blockrelay_worker.transport.events import Event
from blockrelay_worker.transport.mailbox import Mailbox
from blockrelay_worker.transport.redis_links import Stopping


class StageService:
    """A worker's service of one stage under one registration. `run` is called once."""

    def __init__(
        self,
        parts: WorkerParts,
        *,
        state: WorkerMachine | None = None,
        loaded: tuple[StageAssignment, Executor] | None = None,
        succeeds: str = "",
        memory: MemoryWatch | None = None,
    ) -> None:
        """`state` is that of the registration before, and `loaded` the stage that it left loaded.

        `succeeds` is the id of the worker of this process that serves until this one does, if there is one. `memory` is
        that of the registration before.
        """
        self._parts, self._settings, self._folder = parts, parts.settings, parts.folders[0]
        self._executors, self._metrics, self._device = parts.executors, parts.metrics, parts.device
        self._links = parts.links.of_another_engine() if succeeds else parts.links
        self._model = parts.model
        self._loaded, self._succeeds = loaded, succeeds
        self._state = state or WorkerMachine(WORKER)
        if not succeeds:
            self._metrics.states.show(self._state)
        self._numerics = ""  # that of the registration
        self._succession: Succession | None = None
        #: The stages of the model of which it serves one; empty before it has announced that.
        self.split = ""
        self._gives_way = False  # to the worker that it succeeds
        self._memory = memory or MemoryWatch(parts)
        self._guesser: Guesser | None = None

    @property
    def is_overtaken(self) -> bool:
        """Whether it leaves because another plan came before it could take over from the worker that it succeeds."""
        return self._gives_way and self._succession is not None and self._succession.failure is not None

    def run(self) -> None:
        """Serves from entering the registry to leaving it, or returns at once if the worker should end."""
        if self._loaded and not self._loaded[1].usable:
            self._close_stage()
        if self._device and not self._device.wait():
            return
        self._serves(self._parts.planned_folder())
        registration = Registration(
            self._links,
            self._settings,
            model=self._model,
            folder=self._folder.model_key,
            folders=self._parts.offers(None),
            numerics=self._numerics,
            port=self._parts.port,
            nondeterministic=self._executors.nondeterministic,
            slow="" if self._device else shortcoming(),
            loads_beside=self._device is None and not self._folder.model.onnx_blocks,
            succeeds=self._succeeds,
        )
        try:
            assignment = registration.wait_for_assignment(self._given_up, self._may_take)
        except Stopping:
            if self._succeeds:  # the process goes on
                registration.leave("")
            raise
        self._state.on("assigned")
        if not self._succeeds:  # a successor has been made because memory has room for it
            if self._device is None and self._loaded and not self._loaded[0].holds(assignment):
                self._close_stage()
                _collect()
            room_for = self._memory.wait(registration, assignment, self._given_up, self._may_take)
            if room_for is None:
                self._state.on("forgotten")
                return
            assignment = room_for
        self._serves(self._parts.folder_of(assignment.folder))
        try:
            self._load_and_serve(registration, assignment)
        finally:
            if self._device:
                self._device.leave()

    def _given_up(self) -> bool:
        """Returns whether the worker should end instead of waiting for a stage."""
        return self._links.drain.is_requested

    def _may_take(self, assignment: StageAssignment) -> bool:
        """Returns whether a stage may be loaded. A device has stages of one folder at a time: this worker closes its
        own of another folder, and waits until other workers have closed theirs."""
        if self._device is None:
            return True
        folder = self._parts.folder_of(assignment.folder)
        if self._loaded and self._parts.folder_of(self._loaded[0].folder).model_key != folder.model_key:
            with suppress(ExecutionError):  # `_load` deals with a device that is lost
                self._close_stage()
        return self._device.takes(folder)

    def next(self) -> "StageService":
        """Returns the service of the next registration. Waits for the end of the successor, if there is one.

        Raises the error with which the successor ended.
        """
        last = self
        while last._succession is not None and isinstance(successor := last._succession.service, StageService):
            if last._loaded:
                last._close_stage()
            _collect()
            last._succession.join()
            last._succession, last = None, successor
        state = last._state if last.split else None
        return StageService(self._parts, state=state, loaded=last._loaded, memory=self._memory)

    def _serves(self, folder: BlockFolder) -> None:
        """Takes the block folder to serve, and the numerics id with it."""
        self._folder, self._numerics = folder, self._parts.numerics(folder)
        self._parts.registry.tell_build(numerics=self._numerics)

    def _load_and_serve(self, registration: Registration, assignment: StageAssignment) -> None:
        """Loads the assigned stage and serves it until the registration or the device is lost, or the drain is over."""
        try:
            with registration.kept_alive():
                with _memory_errors_told(self._folder, assignment.blocks):
                    executor = self._load(assignment)
                self._guesser = self._parts.guesser(self._folder, assignment.blocks, executor.pool.pages)
        except DeviceLost as lost:
            if self._device is None:  # a rank has ended
                self._metrics.device_losses.labels(lost.reason).inc()
            elif not (self._links.stop.is_set() or lost.reason == MOVED):
                self._device.report_loss(lost)
                if lost.code == "OOM" and self._memory.may_change(self._folder.model_key, assignment.blocks):
                    self._memory.device_ran_out(self._folder.model_key)
                    self._device.forgive()  # it needs no rest, but a smaller folder
            registration.leave(assignment.split)
            self._state.on("device_lost")
            return
        except Exception as error:
            registration.leave(assignment.split)
            may_change = self._memory.may_change(self._folder.model_key, assignment.blocks)
            if is_of_memory(error) and may_change and not self._succeeds:
                self._runs_out()
                self._state.on("memory_lacks")
                return
            self._state.on("failed")
            raise
        if registration.forgotten():
            self._state.on("forgotten")
            return  # the loaded stage is kept for the next registration
        executor = with_faults(executor, self._settings, vocabulary=self._folder.model.vocab_size)
        able = executor.capabilities
        assert able.numerics_id == self._numerics, "the executor computes other bits than those that were registered"
        degrades = self._memory.may_change(self._folder.model_key, assignment.blocks)
        role = role_of(self._parts, self._folder, registration.worker_id, assignment, able, degrades=degrades)
        self._serve(registration, assignment, role, executor)
        if self.is_overtaken:
            self._close_stage()
            _collect()

    def _runs_out(self) -> None:
        """Notes that memory ran out, and gives back what is loaded: the cell may change to a smaller precision."""
        get().warning("MEMORY_RAN_OUT", folder=self._folder.model_key, precision=self._folder.manifest.precision)
        self._memory.ran_out(self._folder.model_key)
        with suppress(ExecutionError):  # `_load` deals with a device that is lost
            if self._loaded:
                self._close_stage()
        _collect()

    def _load(self, assignment: StageAssignment) -> Executor:
        """Returns the stage's executor: the last one if it has the same blocks and is usable, else a new one."""
        if self._device:
            self._device.join()
        if self._loaded and self._loaded[0].holds(assignment) and self._loaded[1].usable:
            return self._loaded[1]
        if self._loaded:
            self._close_stage()
        blocks = assignment.blocks
        with self._metrics.load_seconds.time():
            folder = open_block_folder(self._folder.root, blocks=())  # who reads a block checks it
            with self._device.refusal_is_loss() if self._device else nullcontext():
                pages = self._parts.pages(folder, blocks)
                executor = self._executors.load(folder, blocks.first, blocks.last, pages=pages)
        self._loaded = (assignment, executor)
        if self._device:
            self._device.has_loaded(blocks, executor)
        return executor

    def _close_stage(self) -> None:
        assert self._loaded is not None
        self._loaded[1].close()
        self._loaded = None
        if self._device:
            self._device.has_closed()

    def _serve(
        self, registration: Registration, assignment: StageAssignment, role: StageRole, executor: Executor
    ) -> None:
        """Serves the stage: announces it, runs the engine and the heartbeat, and leaves the registry afterwards."""
        mailbox, over = Mailbox[Event](), threading.Event()
        folder = self._folder.model_key
        retirement = Retirement(
            self._links, self._model, role.worker_id, split=role.split, folder=folder, numerics=self._numerics
        )
        make = partial(self._successor, role.worker_id)
        self._succession = Succession(self._links, self._model, folder, retirement, make)
        cache = cache_of(self._parts, self._links, self._folder, role, executor, mailbox)
        executor.pool.use(self._settings.page_allocation)
        table = RunTable(executor.pool, cache)
        self._metrics.kv_pages_total.set(executor.pool.pages)
        self._metrics.expect_stage(role.stage, role.device, role.first, role.last)
        path, held = self._folder.tokenizer_path, self._loaded
        assert held is not None, "it was loaded"
        care = self._device.care(mailbox) if self._device else care_of_ranks(held[1], mailbox)
        local = open_local_rows(self._settings, role, self._folder.model, self._links, mailbox)
        engine = Engine(
            role,
            self._folder.model,
            Tokenizer.from_file(path) if path else None,
            executor,
            table,
            self._links,
            mailbox,
            self._metrics,
            self._state,
            sampler_of(load_kernels(self._settings.threads if role.last_stage else 1)),
            care,
            local.outgoing,
            self._guesser,
        )
        able, pages, slots = role.capabilities, executor.pool.pages, role.max_requests
        served = {**self._served(assignment, executor), "grammar": engine.grammar_id}
        run_id = registration.announce(
            assignment, pages=pages, slots=slots, served=served, capabilities=able, local_rows=local.address
        )
        self._memory.is_well()
        self._state.on("loaded")
        self._metrics.states.show(self._state)
        if self._device:
            self._device.is_ready()
        counts = {device: int(device == role.device) for device in DEVICES}
        get().info(
            "NODE_READY",
            worker=role.worker_id,
            workers={name: count > 0 for name, count in counts.items()},
            worker_counts=counts,
            stage=role.stage,
            first=role.first,
            last=role.last,
            pages=pages,
            **executor.details,
        )
        threads: list[threading.Thread] = readers_of(self._parts, self._links, role, self._numerics, mailbox, over)
        threads.append(
            Heartbeat(
                self._links,
                mailbox,
                role,
                table,
                run_id=run_id,
                model=self._model,
                folder=self._folder.model_key,
                pace=lambda: engine.pace.pace_at(time.monotonic()) if role.first_stage else None,
                blocks=engine.blocks.times,
                every_s=self._settings.beat_s,
                step_limit_s=self._step_limit_s,
                stop=over,
                memory=lambda: self._memory_of(assignment, executor),
                succession=self._succession,
            )
        )
        for thread in threads:
            thread.start()
        _collect()
        try:
            with self._links.drain.serving(), _memory_errors_told(self._folder, assignment.blocks):
                self.split = role.split
                why = engine.run()
        except ExecutionError as error:
            if not (role.leaves_without_memory and is_of_memory(error)):
                raise
            why = OUT_OF_MEMORY
        finally:
            over.set()
        if self._state.state != "draining":
            self._state.on("drain")
        get().info("NODE_DRAINING", worker=role.worker_id, reason=why)
        registration.leave(role.split)
        local.close()
        for thread in threads:
            thread.join()
        table.check_integrity()
        if cache is not None:
            cache.close(PAGES_FLUSH_S)
        if why == OUT_OF_MEMORY:
            self._runs_out()
        self._state.on("gone")

    def _served(self, assignment: StageAssignment, executor: Executor) -> dict[str, str | int]:
        """Returns the fields of the worker's record that say which folder it serves, and which it could serve."""
        held, free = self._memory_of(assignment, executor)
        return {
            "folder": self._folder.model_key,
            "numerics": self._numerics,
            "folders": folders_to_json(self._parts.offers(assignment.blocks, executor.pool.pages)),
            "held_bytes": held,
            "free_bytes": free,
        }

    def _memory_of(self, assignment: StageAssignment, executor: Executor) -> tuple[int, int]:
        """Returns the bytes that the stage holds, with the KV pages that were used before, and those that are free."""
        pages = executor.pool.pages if self._device else executor.pool.touched_pages
        held = self._parts.stage_bytes(self._folder, assignment.blocks, pages)
        return held, self._parts.free_bytes(self._folder)

    def _successor(self, worker_id: str, place: Place) -> "StageService | Literal['later'] | None":
        """Returns the service that follows this one, in another place of the plan, or that it is too early for one.

        None where there is no memory for both, or would be three. Raises what `WorkerParts.check_alone` raises then.
        """
        workers = read_workers(self._links.control, self._links.keys, self._model)
        before = next((worker for worker in workers if worker.id == self._succeeds), None)
        self._gives_way = before is not None
        if before is not None:  # yet another plan came: one of both makes room for its stage
            is_whole = is_served(self.split, workers, numerics=self._numerics)
            if before.draining or (is_whole and not is_served(before.split, workers, numerics=before.numerics)):
                return "later"  # the one before goes: the route of this one is the only whole one
            return None
        here = {worker.pid for worker in workers if worker.node == host_name()}
        folder = self._parts.folder_of(place.folder)
        ran_out = self._memory.has_run_out(folder.model_key)
        if ran_out or not self._parts.fits_beside(folder, place.blocks, processes=len(here)):
            if folder.model_key != self._folder.model_key:
                self._parts.check_alone(folder, place.blocks)
            return None
        return StageService(self._parts, succeeds=worker_id, memory=self._memory)

    def _step_limit_s(self) -> float:
        """Returns the time in seconds after which a step counts as stuck; a device's process ends before the worker."""
        limit_s = max(self._settings.session_timeout_s, self._links.clock.allowed_s)
        return limit_s * (DEVICE_PATIENCE if self._device else 1)


@contextmanager
def _memory_errors_told(folder: BlockFolder, blocks: Stage) -> Generator[None]:
    """Turns a MemoryError raised inside into an ExecutionError with a line for users about this stage."""
    try:
        yield
    except MemoryError as error:
        raise ExecutionError(
            f"not enough memory for block_{blocks.first} to block_{blocks.last} in {folder.manifest.precision}: give "
            "the worker more memory or fewer blocks, or the system a smaller precision with --other-precision and "
            "--degrade"
        ) from error


def _collect() -> None:
    """Collects garbage, and freezes the objects that are left: scanning them again and again would delay requests."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
