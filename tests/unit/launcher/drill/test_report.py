"""The verdict of a drill on what clients saw: every kind of broken promise is counted and named."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from blockrelay.exit_codes import BROKEN
from blockrelay_launcher.drill.clients import RequestRecord, take_event
from blockrelay_launcher.drill.closeness import Verdict
from blockrelay_launcher.drill.faults import Fault
from blockrelay_launcher.drill.from_logs import own_ends, refusals, run_starts
from blockrelay_launcher.drill.report import Report, judge, show
from blockrelay_launcher.drill.workload import ReferenceAnswer
from blockrelay_launcher.percentile import percentile

ANSWER = ReferenceAnswer(tokens=(5, 6, 7), text="a b c", finish_reason="length", digests=("x", "y"))
OTHER = ReferenceAnswer(tokens=(5, 8, 9), text="a d e", finish_reason="length", digests=("x", "v"))
BY = {(0, "old"): ANSWER, (0, "new"): OTHER, (0, "old+new@1"): OTHER}


def seen(**fields: Any) -> RequestRecord:
    good: dict[str, Any] = {
        "number": 0, "kind": "stream", "started": 0.0, "request_id": "req-1", "events": [1.0, 2.0, 3.0], "ended": 3.0,
        "tokens": [5, 6, 7], "text": "a b c", "finish_reason": "length", "fingerprints": ["old"],
    }  # fmt: skip
    return RequestRecord(**{**good, **fields})


def verdict(*requests: RequestRecord, faults: tuple[Fault, ...] = (), **more: Any) -> Report:
    return judge(requests, lambda ask, fingerprint: BY.get((ask, fingerprint)), faults, seconds=10, **more)


def test_what_is_as_it_should_be() -> None:
    cancelled = seen(kind="cancelled", tokens=[5], text="a", finish_reason="", error="the request was cancelled")
    session = seen(kind="session", tokens=[], digests=["x", "y"], fingerprints=["old", "old"])
    at_once = seen(kind="cancelled", tokens=[], text="", finish_reason="", fingerprints=[])
    report = verdict(seen(), seen(kind="background"), cancelled, seen(kind="cancelled"), session, at_once)
    assert report.good and (report.accepted, report.completed, report.tokens) == (6, 6, 10)


def test_each_answer_is_judged_by_its_fingerprint() -> None:
    new = seen(tokens=[5, 8, 9], text="a d e", fingerprints=["new"])
    both = seen(tokens=[5, 8, 9], text="a d e", fingerprints=["old+new@1"])
    session = seen(kind="session", tokens=[], digests=["x", "v"], fingerprints=["old", "new"])
    report = verdict(seen(), new, both, session)
    assert report.good and report.answers == {"old": 2, "new": 2, "old+new": 1}


@pytest.mark.parametrize(
    ("request_", "counted", "told"),
    [
        (seen(tokens=[5, 9, 7]), "mismatched", "token 2 differs"),
        (seen(tokens=[5, 6]), "mismatched", "2 tokens instead of 3"),
        (seen(text="a c"), "mismatched", "the text differs"),
        (seen(finish_reason="stop"), "mismatched", "it ended as 'stop'"),
        (seen(kind="cancelled", tokens=[6], finish_reason=""), "mismatched", "before the cancellation"),
        (
            seen(kind="session", digests=["x", "z"], fingerprints=["old"] * 2),
            "mismatched",
            "the logits of step 2 differ",
        ),
        (seen(kind="session", digests=["x", "y"], fingerprints=["old", "new"]), "mismatched", "the logits of step 2"),
        (seen(fingerprints=["new"]), "mismatched", "token 2 differs"),
        (seen(fingerprints=["stranger"]), "mismatched", "no known worker is 'stranger'"),
        (seen(fingerprints=[]), "mismatched", "tokens without a fingerprint"),
        (seen(ended=None), "lost", "no end"),
        (seen(error="the record is gone"), "lost", "the record is gone"),
        (seen(request_id="", ended=None, error="refused: 503"), "refused", "refused: 503"),
        (seen(repeated=2), "duplicated", "2 events came twice"),
    ],
)
def test_every_broken_promise_is_counted_and_makes_the_drill_fail(
    request_: RequestRecord, counted: str, told: str
) -> None:
    report = verdict(seen(), request_)
    assert getattr(report, counted) > 0 and not report.good
    assert len(report.wrong) == 1 and told in report.wrong[0]
    out = io.StringIO()
    show(report, Console(file=out, width=120))
    assert told in out.getvalue()


def test_what_gpus_had_a_part_in_is_judged_by_itself() -> None:
    def inexact(one: RequestRecord) -> Verdict | None:
        if one.fingerprints == ["old"]:
            return None
        return Verdict("" if len(one.tokens) == 3 else "it is not whole", how="only_whole", on_gpu=True)

    mixed, moved = seen(tokens=[9, 9, 9], fingerprints=["g/old"]), seen(tokens=[9, 9, 9], fingerprints=["g+old@1"])
    moved.fallbacks = 1
    report = verdict(seen(), mixed, moved, inexact=inexact)
    assert report.good and report.served == {"cpu": 1, "mixed": 1, "handed_over": 1}
    assert (report.fallbacks, report.only_whole, report.compared) == (1, 2, 0)
    report = verdict(seen(tokens=[9, 9, 9]), seen(tokens=[9], fingerprints=["g/old"]), inexact=inexact)
    assert report.mismatched == 2 and "it is not whole" in report.wrong[1]


def test_what_is_beyond_the_tolerance_is_counted_by_itself_and_makes_the_drill_fail() -> None:
    near, far = (Verdict(wrong, beyond=bool(wrong), how="compared") for wrong in ("", "token 2 is behind"))
    report = verdict(seen(), seen(tokens=[5, 9, 7]), inexact=lambda one: far if 9 in one.tokens else near)
    assert (report.compared, report.beyond_tolerance, report.mismatched, report.completed) == (1, 1, 0, 1)
    assert not report.good and "token 2 is behind" in report.wrong[0]
    assert report.served == {"cpu": 1} and report.to_dict()["beyond_tolerance"] == 1
    out = io.StringIO()
    show(report, Console(file=out, width=120))
    lines = [line.split("│")[1:3] for line in out.getvalue().splitlines() if line.startswith("│")]
    shown = {name.strip(): value.strip() for name, value in lines}
    assert (shown["beyond tolerance"], shown["within tolerance"], shown["fallbacks"]) == ("1", "1", "0")


def test_a_trouble_of_the_system_makes_it_fail_too() -> None:
    report = verdict(seen(), troubles=["left behind: {c0}:delayed holds 1"])
    assert not report.good and report.wrong == ["left behind: {c0}:delayed holds 1"]


def test_an_interruption_is_no_loss() -> None:
    report = verdict(seen(), seen(request_id="req-2", ended=None), interrupted=True)
    assert not report.wrong and list(report.unfinished) == ["req-2"] and not report.good


def test_events_that_come_again_are_not_taken_twice() -> None:
    one = RequestRecord(number=0, kind="stream", started=0.0)
    for position, token in ((0, None), (1, 5), (2, 6), (2, 6), (1, 5), (3, 7)):
        choices = [{"index": 0, "token_ids": [token], "text": f"{token}"}] if token else []
        take_event([one], f"req-1:{position}", {"choices": choices})
    assert (one.request_id, one.tokens, one.text, one.repeated) == ("req-1", [5, 6, 7], "567", 2)


class TestRecovery:
    def test_a_kill_lasts_until_the_next_event_of_the_streams_that_were_on_the_worker(self) -> None:
        kill = Fault(at=1.5, kind="kill", target="worker", requests=frozenset({"req-1"}))
        report = verdict(seen(), seen(request_id="req-2", events=[1.0, 9.0], ended=9.0), faults=(kill,))
        assert report.faults == {("kill", "worker"): 1} and report.recovery_s == {("kill", "worker"): [0.5]}

    def test_a_gateway_concerns_whom_it_cut(self) -> None:
        kill = Fault(at=1.5, kind="kill", target="gateway")
        report = verdict(seen(cuts=[1.6]), seen(), seen(cuts=[0.5]), faults=(kill,))
        assert report.recovery_s == {("kill", "gateway"): [0.5]}

    def test_redis_concerns_everybody_who_is_under_way(self) -> None:
        full = Fault(at=2.5, kind="full", target="redis-control")
        late, over = seen(started=2.6), seen(events=[1.0, 2.0], ended=2.0)
        assert verdict(seen(), late, over, faults=(full,)).recovery_s == {("full", "redis-control"): [0.5]}

    def test_figures_are_told_by_kind_and_by_whom_it_met(self) -> None:
        faults = [Fault(at=1.5, kind=kind, target="worker") for kind in ("kill", "stop", "stop")]
        found = verdict(seen(), faults=tuple(faults)).to_dict()
        assert found["faults"] == {"kill": {"worker": 1}, "stop": {"worker": 2}}
        assert found["recovery_s"]["stop"]["worker"] == {"streams": 2, "p50": 0.5, "p99": 0.5, "max": 0.5}

    def test_percentiles_are_values_that_were_seen(self) -> None:
        assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
        assert percentile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0 and percentile([7.0], 0.5) == 7.0


def test_rows_of_later_runs_are_work_done_again(tmp_path: Path) -> None:
    def line(at: int, request_id: str, committed: int, found: int) -> str:
        data = {"prompt_tokens": 20, "committed": committed, "found": found}
        return json.dumps({"timestamp": f"{at}", "event_type": "RUN_START", "request_id": request_id, "data": data})

    (tmp_path / "worker-1.log").write_text(line(3, "req-1", 10, 16) + "\n" + line(1, "req-1", 0, 16) + "\n")
    (tmp_path / "worker-2.log").write_text(line(2, "req-2", 0, 0) + '\n{"event_type": "RUN_START", "request_i')
    report = verdict(seen(), runs=run_starts(tmp_path))
    assert (report.runs, report.reruns) == (3, 1)
    assert (report.rows_redone, report.rows_needed) == (20 + 10 - 16 - 1, 4 + 20 + 3)
    assert replace(report, rows_needed=100).redone == 0.13


class TestOwnEnds:
    KILL, DRAIN = Fault(at=1.0, kind="kill", target="worker"), Fault(at=1.0, kind="drain", target="worker")

    def test_who_was_killed_or_drained_did_not_end_by_itself(self) -> None:
        said = "worker-2 was killed by signal 9; starting it again\nworker-1 ended with code 0; starting it again\n"
        early = "worker-3 was killed by signal 15; starting it again\n"
        assert own_ends(said + early, [self.KILL, self.DRAIN, self.DRAIN]) == []

    @pytest.mark.parametrize(
        "line",
        [
            "worker-1 ended with code 70; starting it again",
            "worker-1 was killed by signal 11; starting it again",
            "gateway-2 was killed by signal 9; starting it again",
            "gateway-2 was killed by signal 15; starting it again",
            "scheduler ended with code 0; starting it again",
            "gateway-2 did not end by itself and was killed",
        ],
    )
    def test_everybody_else_did(self, line: str) -> None:
        assert own_ends(f"ready\n{line}\n", [self.KILL, self.DRAIN]) == [line]

    @pytest.mark.parametrize("worker", ["worker-1", "gpu-worker-webgpu-0"])
    def test_a_worker_whose_device_was_killed_before_it_served(self, worker: str) -> None:
        line = f"{worker} ended with code {BROKEN}; starting it again"
        killed = Fault(at=1.0, kind="kill", target="device")
        assert own_ends(line, [killed]) == [] and own_ends(line, [self.KILL]) == [line]

    def test_a_worker_whose_ranks_were_killed_in_every_load_says_so(self) -> None:
        line = f"worker-2 ended with code {BROKEN}; starting it again"
        said = "worker-2: rank 1 has ended by SIGKILL, 3 times in a row while a stage was loaded"
        rank = Fault(at=1.0, kind="rank", target="worker")
        assert own_ends(f"{said}\n{line}\n", [rank]) == []
        assert own_ends(f"{said}\n{line}\n{line}\n", [rank]) == own_ends(line, [rank]) == [line]
        assert own_ends(f"{said}\n{line}\n", [self.KILL]) == [line]

    def test_one_kill_explains_one_death(self) -> None:
        line = "worker-1 was killed by signal 9; starting it again"
        assert own_ends(f"{line}\n{line}\n", [self.KILL]) == [line]


def test_what_redis_refused_to_a_user_or_across_slots_is_counted_by_log(tmp_path: Path) -> None:
    (tmp_path / "gateway-1.log").write_text("redis.exceptions: NOPERM no right to run 'flushall'\n")
    (tmp_path / "gateway-2.log").write_text("nothing\n")
    across = "CROSSSLOT Keys in request don't hash to the same slot"
    (tmp_path / "worker-1.log").write_text(f"{across}\n{across}\n")
    (tmp_path / "scheduler.log").write_text("Script attempted to access a non local key in a cluster node\n")
    found = ["gateway-1.log: NOPERM 1 times", "scheduler.log: non local key 1 times", "worker-1.log: CROSSSLOT 2 times"]
    assert refusals(tmp_path) == found
