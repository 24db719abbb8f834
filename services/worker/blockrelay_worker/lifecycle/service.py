"""Serves one stage under one registration: registers, loads the blocks, runs the engine, and leaves the registry."""

import gc
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.errors import DeviceLost, RedisTrouble
from blockrelay.host.identity import host_name
from blockrelay.host.memory import available_bytes
from blockrelay.observability.logs import get
from blockrelay.protocol.plan import DEVICES, GPU, is_served
from blockrelay.protocol.served_folder import folders_to_json
from blockrelay.protocol.transitions import calls
from blockrelay.redis.registry import read_workers
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_worker.engine.loop import Engine
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.fault_injection import with_faults
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.kernels.libraries import shortcoming
from blockrelay_worker.kv.prefix_cache import PrefixCache
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.kv.store.factory import open_page_store
from blockrelay_worker.lifecycle.device.on_device import MOVED
from blockrelay_worker.lifecycle.heartbeat import Heartbeat
from blockrelay_worker.lifecycle.local_rows import open_local_rows
from blockrelay_worker.lifecycle.parts import WorkerParts, stage_bytes
from blockrelay_worker.lifecycle.registration import Registration, StageAssignment, rows_arrive
from blockrelay_worker.lifecycle.retirement import Retirement
from blockrelay_worker.lifecycle.succession import Place, Succession
from blockrelay_worker.policy import DEVICE_PATIENCE, PAGES_FLUSH_S
from blockrelay_worker.sampling.row_sampler import sampler_of
from blockrelay_worker.scheduling.guesses import Guesser
from blockrelay_worker.states import WORKER, WorkerMachine
from blockrelay_worker.transport.events import Event
from blockrelay_worker.transport.inbox_reader import Reader
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
    ) -> None:
        """`state` is that of the registration before, and `loaded` the stage that it left loaded.

        `succeeds` is the id of the worker of this process that serves until this one does, if there is one.
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
            assignment = registration.wait_for_assignment(lambda: self._links.drain.is_requested)
        except Stopping:
            if self._succeeds:  # the process goes on
                self._leave(registration, "")
            raise
        self._state.on("assigned")
        self._serves(self._parts.folder_of(assignment.folder))
        try:
            self._load_and_serve(registration, assignment)
        finally:
            if self._device:
                self._device.leave()

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
        return StageService(self._parts, state=last._state if last.split else None, loaded=last._loaded)

    def _serves(self, folder: BlockFolder) -> None:
        """Takes the block folder to serve, and the numerics id with it."""
        self._folder, self._numerics = folder, self._parts.numerics(folder)
        self._parts.registry.tell_build(numerics=self._numerics)

    def _load_and_serve(self, registration: Registration, assignment: StageAssignment) -> None:
        """Loads the assigned stage and serves it until the registration or the device is lost, or the drain is over."""
        try:
            with registration.kept_alive():
                executor = self._load(assignment)
                self._guesser = self._parts.guesser(self._folder, assignment.blocks, executor.pool.pages)
        except DeviceLost as lost:
            ended_by_us = self._links.stop.is_set() or lost.reason == MOVED
            if self._device and not ended_by_us:
                self._device.report_loss(lost)
            self._leave(registration, assignment.split)
            self._state.on("device_lost")
            return
        except Exception:
            self._state.on("failed")
            self._leave(registration, assignment.split)
            raise
        if registration.forgotten():
            self._state.on("forgotten")
            return  # the loaded stage is kept for the next registration
        executor = with_faults(executor, self._settings, vocabulary=self._folder.model.vocab_size)
        role = self._role(registration.worker_id, assignment, executor)
        self._serve(registration, assignment, role, executor)
        if self.is_overtaken:
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

    def _role(self, worker_id: str, assignment: StageAssignment, executor: Executor) -> StageRole:
        """Returns what the engine must know of the stage: its place in the split, and its limits by the settings."""
        settings, able = self._settings, executor.capabilities
        assert able.numerics_id == self._numerics, "the executor computes other bits than those that were registered"
        return StageRole(
            worker_id=worker_id,
            split=assignment.split,
            stage=assignment.stage,
            first=assignment.blocks.first,
            last=assignment.blocks.last,
            blocks=self._folder.model.blocks,
            capabilities=replace(
                able,
                max_rows=min(able.max_rows, settings.max_rows),
                max_sequences=min(able.max_sequences, settings.max_requests),
            ),
            device=settings.device,
            max_requests=settings.max_requests,
            step_target_s=settings.step_target_s,
            step_limit_s=settings.session_timeout_s,
            speculation=settings.speculation == "on",
            inexact_sharing=settings.inexact_sharing == "on"
            and self._executors.nondeterministic
            and (assignment.blocks.first, assignment.blocks.last) == (1, self._folder.model.blocks),
            named_tensors=self._folder.model.onnx_blocks is not None,
        )

    def _serve(
        self, registration: Registration, assignment: StageAssignment, role: StageRole, executor: Executor
    ) -> None:
        """Serves the stage: announces it, runs the engine and the heartbeat, and leaves the registry afterwards."""
        mailbox, over = Mailbox[Event](), threading.Event()
        if not self._device:
            folder = self._folder.model_key
            retirement = Retirement(
                self._links, self._model, role.worker_id, split=role.split, folder=folder, numerics=self._numerics
            )
            make = partial(self._successor, role.worker_id)
            self._succession = Succession(self._links, self._model, folder, retirement, make)
        cache = self._cache(role, executor, mailbox)
        table = RunTable(executor.pool, cache)
        self._metrics.kv_pages_total.set(executor.pool.pages)
        self._metrics.expect_stage(role.stage, role.device, role.first, role.last)
        path, care = self._folder.tokenizer_path, self._device and self._device.care(mailbox)
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
        served = self._served(assignment, pages)
        run_id = registration.announce(
            assignment, pages=pages, slots=slots, served=served, capabilities=able, local_rows=local.address
        )
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
        threads: list[threading.Thread] = self._readers(role, mailbox, over)
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
                succession=self._succession,
            )
        )
        for thread in threads:
            thread.start()
        _collect()
        try:
            with self._links.drain.serving():
                self.split = role.split
                why = engine.run()
        finally:
            over.set()
        if self._state.state != "draining":
            self._state.on("drain")
        get().info("NODE_DRAINING", worker=role.worker_id, reason=why)
        self._leave(registration, role.split)
        local.close()
        for thread in threads:
            thread.join()
        table.check_integrity()
        if cache is not None:
            cache.close(PAGES_FLUSH_S)
        self._state.on("gone")

    def _served(self, assignment: StageAssignment, pages: int) -> dict[str, str | int]:
        """Returns the fields of the worker's record that say which folder it serves, and which it could serve."""
        folder, blocks = self._folder, assignment.blocks
        return {
            "folder": folder.model_key,
            "numerics": self._numerics,
            "folders": folders_to_json(self._parts.offers(blocks)),
            "held_bytes": stage_bytes(folder, blocks, pages) + self._parts.draft_bytes(blocks, pages),
            "free_bytes": available_bytes(),
        }

    def _successor(self, worker_id: str, place: Place) -> "StageService | Literal['later'] | None":
        """Returns the service that follows this one, in another place of the plan, or that it is too early for one.

        None where there is no memory for both, or would be three. Raises BlockFolderError then for damaged blocks.
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
        if not self._parts.fits_beside(folder, place.blocks, processes=len(here)):
            if folder.model_key != self._folder.model_key:
                open_block_folder(folder.root, blocks=range(place.blocks.first, place.blocks.last + 1))
            return None
        return StageService(self._parts, succeeds=worker_id)

    def _step_limit_s(self) -> float:
        """Returns the time in seconds after which a step counts as stuck; a device's process ends before the worker."""
        limit_s = max(self._settings.session_timeout_s, self._links.clock.allowed_s)
        return limit_s * (DEVICE_PATIENCE if self._device else 1)

    def _cache(self, role: StageRole, executor: Executor, mailbox: Mailbox[Event]) -> PrefixCache | None:
        """Returns the cache by which runs share KV pages; None if the settings turn it off, or without KV pages."""
        if not self._settings.prefix_cache or not executor.layout.layers:
            return None
        store = open_page_store(
            self._settings,
            self._links.payload,
            self._links.keys,
            self._folder.manifest,
            executor,
            first_block=role.first,
            metrics=self._metrics,
        )
        return PrefixCache(
            executor.pool,
            model_hash=self._folder.manifest.model_hash,
            numerics=executor.capabilities.numerics_id,
            metrics=self._metrics,
            exact=executor.capabilities.exact,
            stage=role.stage,
            shares_private=role.inexact_sharing,
            store=store,
            deliver=mailbox.put,
        )

    def _readers(self, role: StageRole, mailbox: Mailbox[Event], over: threading.Event) -> list[threading.Thread]:
        """Makes the threads that read the inboxes and, for the first stage, the streams of jobs into `mailbox`."""
        keys, inbox = self._links.keys, self._links.keys.inbox(role.worker_id)
        streams: list[str] = []
        if role.first_stage:
            classes = (GPU,) if role.device == GPU else DEVICES
            streams = [f(self._model, c) for c in classes for f in (keys.reruns, keys.jobs)]
            streams += [keys.pinned(self._model, c, self._numerics) for c in classes]
        watch = self._links.watch
        readers: list[threading.Thread] = [Reader(self._links.control, inbox, streams, mailbox, over, watch)]
        if self._links.payload is not self._links.control and rows_arrive(role.split):
            readers.append(Reader(self._links.payload, inbox, [], mailbox, over, watch))
        return readers

    def _leave(self, registration: Registration, split: str) -> None:
        """Leaves the registry in one try, so that the requests of this worker run again elsewhere."""
        call = calls.dead(registration.worker_id, silent_s=0, reason="drain")
        try:
            self._links.scripts.run(call)
        except RedisTrouble as error:
            self._links.watch.count_error(error)  # the scheduler will notice the missing heartbeats
        if rows_arrive(split):
            registration.leave_payload()


def _collect() -> None:
    """Collects garbage, and freezes the objects that are left: scanning them again and again would delay requests."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
