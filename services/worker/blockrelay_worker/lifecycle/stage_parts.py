"""Makes what the service of one stage consists of: its role, the cache of its KV pages, and the readers of inboxes."""

import threading
from dataclasses import replace

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.capabilities import Capabilities
from blockrelay.protocol.plan import DEVICES, GPU
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.ranks.care import RankCare
from blockrelay_worker.kv.prefix_cache import PrefixCache
from blockrelay_worker.kv.store.factory import open_page_store
from blockrelay_worker.lifecycle.parts import WorkerParts
from blockrelay_worker.lifecycle.registration import StageAssignment, rows_arrive
from blockrelay_worker.transport.events import DeviceEnded, Event
from blockrelay_worker.transport.inbox_reader import Reader
from blockrelay_worker.transport.mailbox import Mailbox
from blockrelay_worker.transport.redis_links import Links


def role_of(
    parts: WorkerParts,
    folder: BlockFolder,
    worker_id: str,
    assignment: StageAssignment,
    able: Capabilities,
    *,
    degrades: bool,
) -> StageRole:
    """Returns what the engine must know of a stage: its place in the split, and its limits by the settings.

    `able` are the capabilities of its executor. `degrades`: the cell may change to a smaller precision of the model.
    """
    settings = parts.settings
    return StageRole(
        worker_id=worker_id,
        split=assignment.split,
        stage=assignment.stage,
        first=assignment.blocks.first,
        last=assignment.blocks.last,
        blocks=folder.model.blocks,
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
        and parts.executors.nondeterministic
        and (assignment.blocks.first, assignment.blocks.last) == (1, folder.model.blocks),
        named_tensors=folder.model.onnx_blocks is not None,
        leaves_without_memory=degrades,
    )


def cache_of(
    parts: WorkerParts, links: Links, folder: BlockFolder, role: StageRole, executor: Executor, mailbox: Mailbox[Event]
) -> PrefixCache | None:
    """Returns the cache by which runs share KV pages.

    None if the settings turn it off, and in a stage of the head, which has no pages.
    """
    if not parts.settings.prefix_cache or not executor.layout.layers:
        return None
    store = open_page_store(
        parts.settings,
        links.payload,
        links.keys,
        folder.manifest,
        executor,
        first_block=role.first,
        metrics=parts.metrics,
    )
    return PrefixCache(
        executor.pool,
        model_hash=folder.manifest.model_hash,
        numerics=executor.capabilities.numerics_id,
        metrics=parts.metrics,
        exact=executor.capabilities.exact,
        stage=role.stage,
        shares_private=role.inexact_sharing,
        store=store,
        deliver=mailbox.put,
    )


def care_of_ranks(executor: Executor, mailbox: Mailbox[Event]) -> RankCare | None:
    """Returns the care of the ranks that share the stage; None if there are none.

    When a rank ends, `mailbox` gets a DeviceEnded event.
    """
    group = executor.group if isinstance(executor, StageExecutor) else None
    if group is None:
        return None
    group.when_lost = lambda: mailbox.put(DeviceEnded())
    return RankCare(group)


def readers_of(
    parts: WorkerParts, links: Links, role: StageRole, numerics: str, mailbox: Mailbox[Event], over: threading.Event
) -> list[threading.Thread]:
    """Returns the threads that read the inboxes and, for the first stage, the streams of jobs into `mailbox`.

    They are not started, and end after `over` is set. `numerics` is the worker's numerics id.
    """
    keys, inbox = links.keys, links.keys.inbox(role.worker_id)
    streams: list[str] = []
    if role.first_stage:
        classes = (GPU,) if role.device == GPU else DEVICES
        streams = [f(parts.model, c) for c in classes for f in (keys.reruns, keys.jobs)]
        streams += [keys.pinned(parts.model, c, numerics) for c in classes]
    readers: list[threading.Thread] = [Reader(links.control, inbox, streams, mailbox, over, links.watch)]
    if links.payload is not links.control and rows_arrive(role.split):
        readers.append(Reader(links.payload, inbox, [], mailbox, over, links.watch))
    return readers
