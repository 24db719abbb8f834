"""MOVE and ACCEPT: a key or session is in one cell only, whichever of two lists of cells its callers have."""

from blockrelay.protocol.transitions import calls
from blockrelay.protocol.transitions.calls import Binding, SessionStep
from tests.support.cell import Cell

KEY = "req-1"


def move(cell: Cell, version: int, *, name: str = KEY, sessions: tuple[str, ...] = ()) -> bool:
    """Whether it is here."""
    request_id = "" if sessions else name
    call = calls.move(Binding(name, version), retention_s=100, request_id=request_id, sessions=sessions)
    return cell.scripts.run(call)


def accept(cell: Cell, version: int) -> str:
    return cell.accept(fingerprint="f", binding=Binding(KEY, version)).status


class TestKeys:
    def test_what_is_here_stays_here(self, cell: Cell) -> None:
        assert accept(cell, 1) == "OK"
        assert move(cell, 2)
        assert accept(cell, 1) == accept(cell, 2) == "EXISTS"
        cell.scripts.run(calls.finish(KEY, "cancelled"))
        assert move(cell, 2), "also when it has ended, for as long as it is kept"

    def test_what_is_not_is_refused_from_then_on_to_whoever_has_an_older_list(self, cell: Cell) -> None:
        assert not move(cell, 2)
        assert cell.accept(fingerprint="f", binding=Binding(KEY, 1)) == calls.Accepted("MOVED", "2")
        assert cell.accept(fingerprint="f").status == "MOVED", "or knows of no list, as one that accepts it again"
        assert cell.queued() == [] and cell.totals() == (0, 0)

    def test_a_newer_list_brings_it_back(self, cell: Cell) -> None:
        assert not move(cell, 2)
        assert accept(cell, 3) == "OK"
        assert not cell.client.exists(cell.keys.moved(KEY)), "or an older list would be refused what is here"
        assert accept(cell, 1) == "EXISTS"

    def test_the_newest_list_counts_in_whatever_order_they_come(self, cell: Cell) -> None:
        assert not move(cell, 3) and not move(cell, 2)
        assert accept(cell, 2) == "MOVED" and accept(cell, 3) == "OK"

    def test_what_nobody_read_to_its_end_counts_as_forgotten(self, cell: Cell) -> None:
        accept(cell, 1)
        cell.scripts.run(calls.finish(KEY, "cancelled", abandoned=True))
        assert not move(cell, 2)
        assert accept(cell, 1) == "MOVED"

    def test_it_is_written_down_for_a_time_and_each_time_anew(self, cell: Cell) -> None:
        move(cell, 2)
        cell.client.expire(cell.keys.moved(KEY), 5)
        move(cell, 2)
        assert 90 < cell.client.ttl(cell.keys.moved(KEY)) <= 100  # pyright: ignore

    def test_requests_without_a_key_have_no_name_that_could_have_moved(self, cell: Cell) -> None:
        move(cell, 2)
        assert cell.accept().status == "OK"


class TestSessions:
    NAME = "session/s"

    def step(self, cell: Cell, number: int, version: int) -> str:
        step = SessionStep(session="s", step=number, fingerprint=f"f{number}", length=number - 1, tokens=b"\1\0\0\0")
        return cell.accept(f"req-{number}-{version}", session=step, binding=Binding(self.NAME, version)).status

    def test_a_session_that_is_here_stays_here(self, cell: Cell) -> None:
        assert self.step(cell, 1, 1) == "OK"
        assert move(cell, 2, name=self.NAME, sessions=("other", "s"))
        assert self.step(cell, 2, 2) == "OK"

    def test_one_that_is_not_does_not_begin_by_an_older_list(self, cell: Cell) -> None:
        assert not move(cell, 2, name=self.NAME, sessions=("s",))
        assert self.step(cell, 1, 1) == "MOVED"
        assert not cell.client.exists(cell.keys.session("s"))
        assert self.step(cell, 1, 3) == "OK"
