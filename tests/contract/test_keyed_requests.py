"""What a record says besides its tokens: which body made it (Idempotency-Key), how long it is kept, its timeline."""

import itertools

from blockrelay.protocol.transitions import calls
from tests.support.cell import Cell, begin_cell


class TestKeyed:
    def test_the_same_fingerprint_is_the_same_request_and_another_is_refused(self, cell: Cell) -> None:
        assert cell.accept(fingerprint="f").status == "OK"
        assert cell.accept(fingerprint="f") == calls.Accepted("EXISTS", "queued")
        assert cell.accept(fingerprint="g") == cell.accept() == calls.Accepted("OTHER", "")
        assert cell.queued() == ["req-1"]

    def test_also_when_it_has_ended_and_for_its_own_retention(self, cell: Cell) -> None:
        cell.accept(fingerprint="f", retention_s=7777)
        cell.scripts.run(calls.finish("req-1", "cancelled"))
        assert cell.accept(fingerprint="f") == calls.Accepted("EXISTS", "done")
        assert cell.accept(fingerprint="g").status == "OTHER"
        assert 7700 < cell.client.ttl(cell.keys.request("req-1")) <= 7777  # pyright: ignore

    def test_what_nobody_read_to_its_end_begins_anew(self, cell: Cell) -> None:
        worker_id = cell.worker("a", split="1-4")
        run = cell.begin(worker_id, [7], fingerprint="f")
        cell.scripts.run(calls.finish("req-1", "cancelled", abandoned=True))
        assert cell.accept(fingerprint="f").status == "OK"
        assert cell.accept(fingerprint="f") == calls.Accepted("EXISTS", "queued")
        assert cell.queued() == ["req-1"] and cell.log() == [] and cell.client.ttl(cell.keys.request("req-1")) == -1
        (again,) = cell.claim(worker_id)
        assert again.tokens == () and cell.commit(run, 0, [7]).verdict == "LOST"

    def test_a_refusal_leaves_what_was_abandoned_as_it_is(self, cell: Cell) -> None:
        cell.accept(fingerprint="f")
        cell.scripts.run(calls.finish("req-1", "cancelled", abandoned=True))
        assert cell.accept(fingerprint="f", limit=0).status == "BUSY"
        assert cell.record()["state"] == "done"

    def test_after_its_loss_it_is_accepted_again(self, cell: Cell) -> None:
        cell.accept(fingerprint="f")
        begin_cell(cell.client, cell.keys)
        assert cell.accept(fingerprint="f").status == "OK" and cell.queued() == ["req-1"]


class TestFollowers:
    """No FINISH for want of a reader comes between a reader's arrival and its first look."""

    def test_who_asks_for_a_known_request_follows_it_from_that_moment_on(self, cell: Cell) -> None:
        cell.client.set(cell.keys.gateway("b"), "", ex=60)
        cell.accept(fingerprint="f", reader="b")
        assert not cell.client.exists(cell.keys.followers("req-1")), "its acceptor alone is no news"
        cell.accept(fingerprint="f", reader="b")
        assert cell.scripts.run(calls.finish("req-1", "cancelled", abandoned=True)) == "READ"
        assert cell.queued() == ["req-1"] and cell.record()["state"] == "queued"
        assert cell.client.ttl(cell.keys.followers("req-1")) > 0  # pyright: ignore
        cell.client.hdel(cell.keys.followers("req-1"), "b")
        assert cell.scripts.run(calls.finish("req-1", "cancelled", abandoned=True)) == "FINISHED"

    def test_a_gateway_that_says_no_more_that_it_lives_follows_nothing(self, cell: Cell) -> None:
        cell.accept(fingerprint="f")
        cell.accept(fingerprint="f", reader="dead")
        assert cell.scripts.run(calls.finish("req-1", "cancelled", abandoned=True)) == "FINISHED"

    def test_a_follower_holds_nothing_up_but_that(self, cell: Cell) -> None:
        cell.client.set(cell.keys.gateway("b"), "", ex=60)
        cell.accept(fingerprint="f")
        cell.accept(fingerprint="f", reader="b")
        assert cell.scripts.run(calls.finish("req-1", "cancelled")) == "FINISHED"

    def test_another_body_under_its_key_follows_nothing(self, cell: Cell) -> None:
        cell.accept(fingerprint="f")
        assert cell.accept(fingerprint="g", reader="b").status == "OTHER"
        assert not cell.client.exists(cell.keys.followers("req-1"))


class TestTimeline:
    def test_every_step_leaves_a_note(self, cell: Cell) -> None:
        cell.worker("a", split="1-4")
        run = cell.begin("a", [7])
        cell.commit(run, 1, [8])
        cell.rerun(run, "drain")
        (run,) = cell.claim("a")
        cell.commit(run, 2, [9], end="stop")
        events = cell.timeline()
        names = ["accepted", "queued", "claimed", "first_token", "rerun", "claimed", "end"]
        assert [event["event"] for event in events] == names
        assert (events[4]["reason"], events[4]["tokens"], events[6]["reason"]) == ("drain", 2, "stop")
        assert all(a["at_ms"] <= b["at_ms"] for a, b in itertools.pairwise(events))

    def test_it_is_bounded_and_keeps_what_is_newest(self, cell: Cell) -> None:
        cell.worker("a", split="1-4")
        cell.accept()
        for _ in range(40):
            (run,) = cell.claim("a")
            cell.rerun(run, "drain")
        assert 900 < len(cell.record()["notes"]) <= 1000
        events = cell.timeline()
        assert [event["event"] for event in events[-2:]] == ["claimed", "rerun"]
        assert [event["event"] for event in events[:2]] == ["accepted", "queued"]
