"""Opens a worker's channels for rows of workers on the same host, which bypass Redis while it serves a stage."""

from dataclasses import dataclass

from blockrelay.block_folder.model import ModelConfig
from blockrelay.observability.logs import get
from blockrelay.protocol.encoding.named_tensors import MAX_MESSAGE_WEIGHT
from blockrelay.settings import WorkerSettings
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.scheduling.limits import BatchLimits
from blockrelay_worker.transport.events import Event
from blockrelay_worker.transport.local_rows.deaths import Deaths
from blockrelay_worker.transport.local_rows.inbox import LocalInbox
from blockrelay_worker.transport.local_rows.links import LocalLinks
from blockrelay_worker.transport.local_rows.system import HAS_LOCAL_ROWS
from blockrelay_worker.transport.mailbox import Mailbox
from blockrelay_worker.transport.redis_links import Links

#: Bytes of a ring buffer for the headers of messages.
HEAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LocalRows:
    """The local channels of a worker; empty where all its rows go through Redis."""

    inbox: LocalInbox | None = None
    outgoing: LocalLinks | None = None

    @property
    def address(self) -> str:
        """Value of the field `local_rows` of the worker's record; "" without local channels."""
        return self.inbox.address.to_record() if self.inbox else ""

    def close(self) -> None:
        """Closes the channels, which senders notice. To be called after the worker has left the registry."""
        if self.inbox is not None:
            self.inbox.close()
        if self.outgoing is not None:
            self.outgoing.close()


def open_local_rows(
    settings: WorkerSettings, role: StageRole, model: ModelConfig, links: Links, mailbox: Mailbox[Event]
) -> LocalRows:
    """Opens the local channels and starts to listen.

    Returns an empty LocalRows where the settings turn them off, the system lacks the sockets, or the worker has the
    whole model and so exchanges no rows. It also does so if they cannot be opened, and logs why.
    """
    if settings.local_rows == "off" or not HAS_LOCAL_ROWS or (role.first_stage and role.last_stage):
        return LocalRows()
    try:
        inbox, deaths = LocalInbox(mailbox), Deaths(links)
    except OSError as error:
        get().warning("LOCAL_ROWS_NOT_POSSIBLE", worker=role.worker_id, error=str(error))
        return LocalRows()
    inbox.start()
    deaths.start()
    size = ring_bytes(role.limits, None if role.named_tensors else model.hidden_size)
    return LocalRows(inbox, LocalLinks(role.worker_id, size, links.read_worker, deaths))


def ring_bytes(limits: BatchLimits, hidden: int | None) -> int:
    """Returns the size of a ring buffer: two of the largest messages, of which one is computed while the other arrives.

    Memory that is never written takes no physical memory. `hidden`: the width of a row; None for named tensors.
    """
    largest = MAX_MESSAGE_WEIGHT if hidden is None else limits.max_rows * hidden * 4
    return 2 * (largest + HEAD_BYTES)
