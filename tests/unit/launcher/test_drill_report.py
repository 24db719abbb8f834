"""The verdict of a drill on what clients saw: every kind of broken promise is counted and named."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from blockrelay_launcher.drill.asks import Answer
from blockrelay_launcher.drill.kills import Kill
from blockrelay_launcher.drill.load import Seen
from blockrelay_launcher.drill.report import Report, judge, percentile, run_starts, show

ANSWER = Answer(tokens=(5, 6, 7), text="a b c", finish_reason="length", digests=("x", "y"))


def seen(**fields: Any) -> Seen:
    good: dict[str, Any] = {
        "ask": 0, "kind": "stream", "started": 0.0, "request": "req-1", "events": [1.0, 2.0, 3.0], "ended": 3.0,
        "tokens": [5, 6, 7], "text": "a b c", "finish_reason": "length",
    }  # fmt: skip
    return Seen(**{**good, **fields})


def verdict(*requests: Seen, kills: tuple[Kill, ...] = (), **more: Any) -> Report:
    return judge(requests, [ANSWER], kills, seconds=10, **more)


def test_what_is_as_it_should_be() -> None:
    cancelled = seen(kind="cancelled", tokens=[5], text="a", finish_reason="", error="the request was cancelled")
    session = seen(kind="session", tokens=[], digests=["x", "y"])
    report = verdict(seen(), seen(kind="background"), cancelled, seen(kind="cancelled"), session)
    assert report.good and (report.accepted, report.completed, report.tokens) == (5, 5, 10)


@pytest.mark.parametrize(
    ("request_", "counted", "told"),
    [
        (seen(tokens=[5, 9, 7]), "mismatched", "token 2 differs"),
        (seen(tokens=[5, 6]), "mismatched", "2 tokens instead of 3"),
        (seen(text="a c"), "mismatched", "the text differs"),
        (seen(finish_reason="stop"), "mismatched", "it ended as 'stop'"),
        (seen(kind="cancelled", tokens=[6], finish_reason=""), "mismatched", "before the cancellation"),
        (seen(kind="session", digests=["x", "z"]), "mismatched", "the logits of step 2 differ"),
        (seen(ended=None), "lost", "no end"),
        (seen(error="the record is gone"), "lost", "the record is gone"),
        (seen(request="", ended=None, error="refused: 503"), "refused", "refused: 503"),
        (seen(repeated=2), "duplicated", "2 events came twice"),
    ],
)
def test_every_broken_promise_is_counted_and_makes_the_drill_fail(request_: Seen, counted: str, told: str) -> None:
    report = verdict(seen(), request_)
    assert getattr(report, counted) > 0 and not report.good
    assert len(report.wrong) == 1 and told in report.wrong[0]
    out = io.StringIO()
    show(report, Console(file=out, width=120))
    assert told in out.getvalue()


def test_what_ended_requests_leave_behind_is_a_fault() -> None:
    report = verdict(seen(), left_behind=["{c0}:delayed holds 1"])
    assert not report.good and report.wrong == ["left behind: {c0}:delayed holds 1"]


def test_an_interruption_is_no_loss() -> None:
    report = verdict(seen(), seen(request="req-2", ended=None), interrupted=True)
    assert not report.wrong and list(report.unfinished) == ["req-2"] and not report.good


def test_events_that_come_again_are_not_taken_twice() -> None:
    one = Seen(ask=0, kind="stream", started=0.0)
    for position, token in ((0, None), (1, 5), (2, 6), (2, 6), (1, 5), (3, 7)):
        choices = [{"token_ids": [token], "text": f"{token}"}] if token else []
        one.take(f"req-1:{position}", {"choices": choices})
    assert (one.request, one.tokens, one.text, one.repeated) == ("req-1", [5, 6, 7], "567", 2)


class TestRecovery:
    def test_a_kill_lasts_until_the_next_event_of_the_streams_that_were_on_the_worker(self) -> None:
        kill = Kill(at=1.5, role="worker", pid=1, requests=frozenset({"req-1"}))
        report = verdict(seen(), seen(request="req-2", events=[1.0, 9.0], ended=9.0), kills=(kill,))
        assert report.kills == {"worker": 1} and report.recovery_s == {"worker": [0.5]}

    def test_a_gateway_concerns_whom_it_cut(self) -> None:
        kill = Kill(at=1.5, role="gateway", pid=1)
        report = verdict(seen(cuts=[1.6]), seen(), seen(cuts=[0.5]), kills=(kill,))
        assert report.recovery_s == {"gateway": [0.5]}

    def test_redis_concerns_everybody_who_is_under_way(self) -> None:
        kill = Kill(at=2.5, role="redis", pid=1)
        late, over = seen(started=2.6), seen(events=[1.0, 2.0], ended=2.0)
        assert verdict(seen(), late, over, kills=(kill,)).recovery_s == {"redis": [0.5]}

    def test_who_only_slept_has_a_row_of_its_own(self) -> None:
        report = verdict(seen(), kills=(Kill(at=1.5, role="worker", pid=1, stopped_s=5.0),))
        assert report.kills == {"worker (stopped)": 1}

    def test_percentiles_are_values_that_were_seen(self) -> None:
        assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.0
        assert percentile([1.0, 2.0, 3.0, 4.0], 99) == 4.0 and percentile([7.0], 50) == 7.0


def test_rows_of_later_runs_are_work_done_again(tmp_path: Path) -> None:
    def line(at: int, request: str, committed: int, found: int) -> str:
        data = {"prompt_tokens": 20, "committed": committed, "found": found}
        return json.dumps({"timestamp": f"{at}", "event_type": "RUN_START", "request_id": request, "data": data})

    (tmp_path / "worker-1.log").write_text(line(3, "req-1", 10, 16) + "\n" + line(1, "req-1", 0, 16) + "\n")
    (tmp_path / "worker-2.log").write_text(line(2, "req-2", 0, 0) + '\n{"event_type": "RUN_START", "request_i')
    report = verdict(seen(), runs=run_starts(tmp_path))
    assert (report.runs, report.reruns) == (3, 1)
    assert (report.rows_redone, report.rows_needed) == (20 + 10 - 16 - 1, 4 + 20 + 3)
    assert replace(report, rows_needed=100).redone == 0.13
