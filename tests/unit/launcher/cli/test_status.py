"""`blockrelay status` and `cancel` against a real Redis."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from blockrelay.errors import ServiceUnavailable, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.plan import Plan
from blockrelay.protocol.transitions import calls
from blockrelay.redis.cell_address import CellAddress, find_cell
from blockrelay.redis.connections import checked_url
from blockrelay.settings import Settings
from blockrelay_launcher.cli.status import cancel, read_status, show
from blockrelay_launcher.cli.trouble import sentences
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
def address(redis_server: RedisServer, keys: Keys) -> CellAddress:
    return CellAddress(redis_server.url, Settings(cell=keys.cell))


def shown(address: CellAddress, *, width: int = 160) -> str:
    out = io.StringIO()
    show(read_status(address), Console(file=out, width=width))
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


@pytest.mark.parametrize("width", [60, 80, 160])
def test_no_heading_is_cut_however_narrow_the_terminal_is(cell: Cell, address: CellAddress, width: int) -> None:
    cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="cpu", plan=PLAN.to_json()))
    cell.worker("a-host.example:12345:abcdef0123abcd")
    text = shown(address, width=width)
    assert "…" not in text
    for heading in ("stage", "blocks", "workers", "why", "device", "state", "requests", "pages", "heartbeat"):
        assert heading in text
    assert "a-host.example:12345:abcdef0123abcd" in text


def test_status_says_what_somebody_should_look_at(cell: Cell, address: CellAddress) -> None:
    cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="cpu", plan=PLAN.to_json()))
    cell.worker("a", split="1-4", numerics="old")
    cell.accept("req-1")
    cell.accept("req-2")
    assert "no progress" not in shown(address) and "books" not in shown(address)
    cell.client.zadd(cell.keys.running, {"req-2": read_clock(cell) - 70_000})
    assert "no progress for 70" in shown(address) and "req-2, waits for a worker" in shown(address)
    (run,) = [run for run in cell.claim("a", 2) if run.request_id == "req-2"]
    cell.client.zadd(cell.keys.running, {"req-2": read_clock(cell) - 70_000})
    assert "req-2, on a" in shown(address)
    assert cell.commit(run, 0, [5]).verdict == "OK"
    cell.scripts.run(calls.dead("a", silent_s=0))
    assert "waiting for a worker of numerics id old, of which none is left: 1 request" in shown(address)
    cell.client.hincrby(cell.keys.totals(MODEL), "accepted", 3)
    assert "the books do not balance by 3: 5 accepted, ended none, 2 in flight" in shown(address)
    used = read_status(address)["trouble"]["memory"]["used"]
    cell.client.config_set("maxmemory", int(used / 0.9))
    assert "MiB: ended requests are forgotten early" in shown(address)
    cell.client.config_set("maxmemory", 0)
    trouble = read_status(address)["trouble"]
    assert 0 < trouble["answer_s"] < 60
    assert "to answer" not in "".join(sentences({**trouble, "answer_s": 0.0003}))
    assert "takes 12 ms to answer" in sentences({**trouble, "answer_s": 0.0123})[-1]


def test_status_says_which_workers_are_slow_and_why(cell: Cell, address: CellAddress) -> None:
    cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="cpu", plan=PLAN.to_json()))
    cell.worker("fine")
    assert "slow" not in shown(address)
    cell.worker("a", slow="NumPy computes; install a compiler")
    cell.worker("b", slow="NumPy computes; install a compiler")
    assert "slow: NumPy computes; install a compiler (a, b)\n" in shown(address)
    workers = read_status(address)["models"][MODEL]["workers"]
    assert {one["id"]: one["slow"] for one in workers}["fine"] == ""


def read_clock(cell: Cell) -> int:
    seconds, micros = cell.client.time()  # pyright: ignore[reportGeneralTypeIssues]
    return int(seconds) * 1000 + int(micros) // 1000


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
