"""The size of the memory that a worker shares with the worker to which it sends rows."""

import os

import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.encoding.named_tensors import MAX_MESSAGE_WEIGHT
from blockrelay.settings import WorkerSettings
from blockrelay_worker.lifecycle.local_rows import open_local_rows
from blockrelay_worker.transport.events import Event
from blockrelay_worker.transport.local_rows.ring import new_ring
from blockrelay_worker.transport.local_rows.system import HAS_LOCAL_ROWS
from blockrelay_worker.transport.mailbox import Mailbox
from tests.support.cell import Cell
from tests.support.worker.links import links_of
from tests.support.worker.stage_role import stage_role

pytestmark = pytest.mark.skipif(not HAS_LOCAL_ROWS, reason="rows go through Redis there")


@pytest.mark.parametrize("named", [False, True])
def test_two_of_the_largest_messages_fit(w8a8: BlockFolder, cell: Cell, named: bool) -> None:
    """ONNX blocks that others made have rows of no width that is known."""
    role = stage_role(w8a8, "w0", split="1-2,3-5", stage=0, first=1, last=2, named_tensors=named)
    local = open_local_rows(WorkerSettings(), role, w8a8.model, links_of(cell), Mailbox[Event]())
    assert local.outgoing is not None
    size = local.outgoing._ring_bytes  # pyright: ignore[reportPrivateUsage]
    local.close()
    message = MAX_MESSAGE_WEIGHT if named else 64 * w8a8.model.hidden_size * 4
    assert 2 * message < size < 2 * message + (4 << 20)
    ring, shared = new_ring(size)
    assert os.fstat(ring).st_blocks == 0, "what is not used is not there"
    shared.close()
    os.close(ring)
