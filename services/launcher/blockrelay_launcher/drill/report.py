"""The verdict on every request, and the table. Pure: what clients saw and what was killed in, figures out."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from blockrelay_launcher.drill.asks import Answer
from blockrelay_launcher.drill.kills import Kill
from blockrelay_launcher.drill.load import Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`recovery_s`: per role, from a kill to the next event of each stream that it concerned, ascending.

    `lost` were accepted and ended with an error or not at all; `refused` were never accepted; `unfinished` were under
    way when somebody interrupted the drill. `left_behind`: what Redis holds although every request has ended. `wrong`
    says what is wrong with each request with which something is.
    """

    seconds: float
    accepted: int
    completed: int
    lost: int
    mismatched: int
    duplicated: int
    refused: int
    unfinished: Sequence[str]
    tokens: int
    kills: Mapping[str, int]
    recovery_s: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    runs: int = 0
    reruns: int = 0
    rows_needed: int = 0
    rows_redone: int = 0
    left_behind: Sequence[str] = ()
    wrong: Sequence[str] = ()

    @property
    def good(self) -> bool:
        broken = self.lost or self.mismatched or self.duplicated or self.refused or self.left_behind
        return not broken and self.accepted == self.completed

    @property
    def redone(self) -> float:
        return self.rows_redone / max(1, self.rows_needed)

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        quantiles = {"p50": 50, "p99": 99, "max": 100}
        plain["recovery_s"] = {
            role: {"streams": len(times), **{name: percentile(times, q) for name, q in quantiles.items()}}
            for role, times in self.recovery_s.items()
        }
        return plain | {
            "good": self.good,
            "tokens_per_s": round(self.tokens / self.seconds, 1) if self.seconds else None,
            "redone": round(self.redone, 4),
        }


def percentile(ascending: Sequence[float], q: int) -> float:
    """The smallest value that at least q % do not exceed."""
    return round(ascending[min(len(ascending) - 1, -(-len(ascending) * q // 100) - 1)], 3)


def fault_of(seen: Seen, answer: Answer) -> str:
    """What is wrong with the content of a request that ended; "" when nothing is."""
    tokens = tuple(seen.tokens)
    if seen.kind == "session":
        steps = zip(seen.digests, answer.digests, strict=True)
        return next((f"the logits of step {n} differ" for n, (got, own) in enumerate(steps, 1) if got != own), "")
    if seen.kind == "cancelled" and not seen.finish_reason:
        return "" if tokens == answer.tokens[: len(tokens)] else "tokens before the cancellation differ"
    if tokens != answer.tokens:
        at = next((i for i, pair in enumerate(zip(tokens, answer.tokens, strict=False)) if pair[0] != pair[1]), None)
        return f"{len(tokens)} tokens instead of {len(answer.tokens)}" if at is None else f"token {at + 1} differs"
    if seen.text != answer.text:
        return "the text differs"
    return "" if seen.finish_reason == answer.finish_reason else f"it ended as {seen.finish_reason!r}"


def judge(
    seen: Sequence[Seen],
    answers: Sequence[Answer],
    kills: Sequence[Kill],
    *,
    seconds: float,
    interrupted: bool = False,
    runs: Iterable[Mapping[str, Any]] = (),
    left_behind: Sequence[str] = (),
) -> Report:
    """`answers` by the number of the ask. `runs`: the data of every RUN_START in the workers' logs, in order."""
    count: Counter[str] = Counter()
    wrong, unfinished = list[str](), list[str]()
    for one in seen:
        name = f"{one.request or '(not accepted)'} ({one.kind})"
        count["accepted"] += one.accepted
        count["tokens"] += len(one.tokens)
        count["duplicated"] += one.repeated
        if one.repeated:
            wrong.append(f"{name}: {one.repeated} events came twice")
        if one.ended is None and interrupted and not one.error:
            unfinished.append(one.request)
        elif not one.accepted:
            count["refused"] += 1
            wrong.append(f"{name}: {one.error or 'no answer'}")
        elif one.ended is None or (one.error and one.kind != "cancelled"):
            count["lost"] += 1
            wrong.append(f"{name}: {one.error or 'no end'}")
        elif fault := fault_of(one, answers[one.ask]):
            count["mismatched"] += 1
            wrong.append(f"{name}: {fault}")
        else:
            count["completed"] += 1
    started = Counter[str]()
    for run in runs:
        rows = run["prompt_tokens"] + run["committed"] - run["found"]
        started[run["request_id"]] += 1
        if started[run["request_id"]] > 1:
            count["rows_redone"] += rows - 1
        else:
            count["rows_needed"] += rows
    return Report(
        seconds=round(seconds, 1),
        accepted=count["accepted"],
        completed=count["completed"],
        lost=count["lost"],
        mismatched=count["mismatched"],
        duplicated=count["duplicated"],
        refused=count["refused"],
        unfinished=[request for request in unfinished if request],
        tokens=count["tokens"],
        kills=dict(Counter(_role(kill) for kill in kills)),
        recovery_s=_recoveries(seen, kills),
        runs=started.total(),
        reruns=started.total() - len(started),
        rows_needed=count["rows_needed"] + count["tokens"],
        rows_redone=count["rows_redone"],
        left_behind=left_behind,
        wrong=[*wrong, *(f"left behind: {what}" for what in left_behind)],
    )


def _role(kill: Kill) -> str:
    return f"{kill.role} (stopped)" if kill.stopped_s else kill.role


def _recoveries(seen: Sequence[Seen], kills: Sequence[Kill]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for kill in kills:
        for one in seen:
            if one.kind in ("background", "session") or one.started > kill.at or (one.ended or kill.at) < kill.at:
                continue
            later = next((at for at in one.events if at > kill.at), None)
            if later is None or not one.events or not _concerns(kill, one, later):
                continue
            found.setdefault(_role(kill), []).append(later - kill.at)
    return {role: sorted(times) for role, times in sorted(found.items())}


def _concerns(kill: Kill, one: Seen, later: float) -> bool:
    """Whether the kill is felt by a stream whose next event came at `later`."""
    if kill.role == "gateway":
        return any(kill.at < cut < later for cut in one.cuts)
    return kill.requests is None or one.request in kill.requests


def run_starts(logs: Path) -> Iterable[Mapping[str, Any]]:
    """The data of every RUN_START line of the workers' logs, oldest first."""
    found: list[tuple[str, dict[str, Any]]] = []
    for path in logs.glob("*worker*.log"):
        with path.open(errors="replace") as lines:
            for line in lines:
                if "RUN_START" not in line:
                    continue
                try:
                    event = json.loads(line)
                    found.append((event["timestamp"], {"request_id": event["request_id"], **event["data"]}))
                except (ValueError, KeyError):
                    continue  # cut off by a kill
    return [data for _, data in sorted(found, key=lambda pair: pair[0])]


def show(report: Report, console: Console) -> None:
    """The tables, and below them what is wrong."""
    table = Table(show_header=False, title=f"drill of {report.seconds:.0f} s")
    rows = {
        "accepted": report.accepted,
        "completed": report.completed,
        "lost": report.lost,
        "mismatched": report.mismatched,
        "duplicated events": report.duplicated,
        "never accepted": report.refused,
        "tokens": f"{report.tokens} ({report.tokens / max(report.seconds, 1e-9):.0f}/s)",
        "runs": f"{report.runs}, {report.reruns} of them again",
        "rows redone": f"{100 * report.redone:.1f} % of those needed",
    }
    if report.unfinished:
        rows["under way at the end"] = ", ".join(report.unfinished)
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table)
    table = Table("role", "kills", "streams", "recovery p50", "p99", "longest")
    for role, kills in sorted(report.kills.items()):
        times = report.recovery_s.get(role, ())
        figures = [f"{percentile(times, q):.2f} s" for q in (50, 99, 100)] if times else []
        table.add_row(role, str(kills), str(len(times)), *figures)
    console.print(table)
    for line in report.wrong[:20]:
        console.print(f"wrong: {line}", highlight=False, markup=False)
    if len(report.wrong) > 20:
        console.print(f"and {len(report.wrong) - 20} more")
