"""`blockrelay status` and `cancel` against a real Redis."""

import io
from pathlib import Path

import pytest
import redis
from rich.console import Console

from blockrelay.errors import ServiceUnavailable, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.plan import Plan
from blockrelay.protocol.transitions import calls
from blockrelay.redis.cell_address import CellAddress, find_cell
from blockrelay.redis.client import Scripts
from blockrelay.redis.connections import checked_url
from blockrelay.settings import Settings
from blockrelay_launcher.cli.status import cancel, read_status, show
from tests.support.cell import MODEL, Cell
from tests.support.redis.redis_server import RedisServer

PLAN = Plan(
    epoch=1,
    split="1-2,3-4",
    route_class="cpu",
    assignments={"a": 0, "b": 1},
    blocks={},
    reasons=("the front half", "the back half"),
)


@pytest.fixture
def cell(client: redis.Redis, keys: Keys, scripts: Scripts) -> Cell:
    return Cell(client, keys, scripts)


@pytest.fixture
def address(redis_server: RedisServer, keys: Keys) -> CellAddress:
    return CellAddress(redis_server.url, Settings(cell=keys.cell))


def shown(address: CellAddress) -> str:
    out = io.StringIO()
    show(read_status(address), Console(file=out, width=160))
    return out.getvalue()


def test_status_shows_plan_workers_and_queue(cell: Cell, address: CellAddress) -> None:
    assert "no plan yet" in shown(address)
    cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="cpu", plan=PLAN.to_json()))
    cell.worker("a", stage=0)
    cell.accept("req-1")
    found = read_status(address)
    assert found["in_flight"] == 1 and found["dead_letters"] == 0
    model = found["models"][MODEL]
    assert model["queue"] == {"jobs:cpu": 1, "jobs:gpu": 0, "reruns:cpu": 0, "reruns:gpu": 0}
    assert [(w["id"], w["state"]) for w in model["workers"]] == [("a", "ready")]
    assert model["missing"] == ["stage 1 (block_3 to block_4) has no live worker"]
    text = shown(address)
    for part in ("the front half", "epoch 1", "ready", "jobs:cpu 1", "not ready: stage 1", "in flight: 1"):
        assert part in text


def test_cancel_ends_a_request_by_any_of_its_names(cell: Cell, address: CellAddress) -> None:
    for number, prefix in enumerate(("req", "cmpl", "chatcmpl")):
        digits = f"{number:024x}"
        cell.accept(f"req-{digits}")
        assert cancel(address, f"{prefix}-{digits}") == f"{prefix}-{digits} is cancelled"
        assert cell.record(f"req-{digits}")["end"] == "cancelled"
        assert cancel(address, f"{prefix}-{digits}") == f"{prefix}-{digits} had already ended"


def test_an_unknown_id_is_a_usage_error(address: CellAddress) -> None:
    with pytest.raises(UsageError, match="there is no request req-nobody"):
        cancel(address, "req-nobody")


def test_redis_that_does_not_answer_is_said(tmp_path: Path) -> None:
    with pytest.raises(ServiceUnavailable, match="Redis does not answer"):
        read_status(CellAddress(f"unix://{tmp_path}/none.sock", Settings()))


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(UsageError, match="not the URL of a Redis"):
        checked_url("localhost:6379")
    with pytest.raises(UsageError, match="not both"):
        find_cell("redis://h", Path("x"))
