"""Judges every request of a drill and prints the table. Pure, except for printing."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay_launcher.drill.clients import RequestRecord
from blockrelay_launcher.drill.closeness import Verdict
from blockrelay_launcher.drill.faults import Fault
from blockrelay_launcher.drill.workload import ReferenceAnswer
from blockrelay_launcher.percentile import percentile
from blockrelay_launcher.tables import facts_table

#: The kind and the target of a fault.
Blow = tuple[str, str]
Served = Literal["cpu", "mixed", "handed_over"]
#: The counts of a Report that `judge` adds up request by request.
COUNTED = (
    "accepted", "completed", "lost", "mismatched", "duplicated", "refused", "beyond_tolerance", "compared",
    "only_whole", "fallbacks", "tokens", "choices", "calls",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of a drill. Counts are numbers of requests if not said otherwise."""

    seconds: float
    accepted: int
    completed: int
    """Requests that ended with their right answer, or with one that `compared` or `only_whole` counts."""
    lost: int
    """Requests that were accepted and ended with an error (if not cancelled) or not at all."""
    mismatched: int
    """Requests that ended with another answer than the right one."""
    duplicated: int
    """Events that came twice."""
    choices: int = 0
    """Requests that were one of several choices of a body."""
    calls: int = 0
    """Tool calls in answers."""
    refused: int
    """Requests that were never accepted."""
    interrupted: bool
    beyond_tolerance: int = 0
    """Requests too far from the reference logits."""
    compared: int = 0
    """Requests near the reference logits."""
    only_whole: int = 0
    """Sampled answers of nondeterministic devices, which were only checked for being complete."""
    fallbacks: int = 0
    """Moves of requests from a GPU to a CPU."""
    unfinished: Sequence[str]
    """Ids of requests that were running when the drill was interrupted."""
    tokens: int
    """Tokens in answers."""
    faults: Mapping[Blow, int]
    recovery_s: Mapping[Blow, Sequence[float]] = field(default_factory=dict[Blow, Sequence[float]])
    """Seconds from a fault to the next event of each stream that it concerned, ascending."""
    answers: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of answers by system_fingerprint, without the positions at which an id changed."""
    served: Mapping[Served, int] = field(default_factory=dict[Served, int])
    """Requests by device: CPUs alone (`cpu`), a part on a GPU (`mixed`), or handed over from a GPU to a CPU."""
    runs: int = 0
    """Runs of requests on workers."""
    reruns: int = 0
    """Runs after the first of a request."""
    rows_needed: int = 0
    """Tokens that had to be computed."""
    rows_redone: int = 0
    """Tokens that were computed again by later runs."""
    troubles: Sequence[str] = ()
    """Faults of the system itself: a process that ended by itself, or state that Redis keeps after all requests."""
    wrong: Sequence[str] = ()
    """A sentence for each request with an error, then the troubles."""

    @property
    def good(self) -> bool:
        """True if every accepted request completed, none was refused, no event came twice, and there is no trouble."""
        broken = self.lost or self.mismatched or self.beyond_tolerance or self.duplicated or self.refused
        return not broken and not self.troubles and self.accepted == self.completed

    @property
    def redone(self) -> float:
        """The share of needed tokens that were computed again."""
        return self.rows_redone / max(1, self.rows_needed)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as the JSON object of `--json`."""
        plain = asdict(self)
        quantiles = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        plain["faults"], plain["recovery_s"] = dict[str, Any](), dict[str, Any]()
        for (kind, target), count in sorted(self.faults.items()):
            plain["faults"].setdefault(kind, {})[target] = count
        for (kind, target), times in sorted(self.recovery_s.items()):
            figures = {"streams": len(times), **{name: round(percentile(times, q), 3) for name, q in quantiles.items()}}
            plain["recovery_s"].setdefault(kind, {})[target] = figures
        return plain | {
            "good": self.good,
            "tokens_per_s": round(self.tokens / self.seconds, 1) if self.seconds else None,
            "redone": round(self.redone, 4),
        }


def difference(seen: RequestRecord, answer_of: Callable[[int, str], ReferenceAnswer | None]) -> str:
    """Returns the error in the content of a request that ended; "" if none. `answer_of` is the `answer` of `judge`."""
    answers = [answer_of(seen.number, fingerprint) for fingerprint in seen.fingerprints]
    for fingerprint, answer in zip(seen.fingerprints, answers, strict=True):
        if answer is None:
            return f"no known worker is {fingerprint!r}"
    if seen.kind == "session":
        pairs = ((n, answer.digests[n - 1]) for n, answer in enumerate(answers, 1) if answer)
        return next((f"the logits of step {n} differ" for n, own in pairs if seen.digests[n - 1] != own), "")
    answer, tokens = answers[0] if answers else None, tuple(seen.tokens)
    if answer is None:
        return "tokens without a fingerprint" if tokens or seen.kind != "cancelled" else ""
    if seen.missing:
        return f"{seen.missing} events are missing"
    if seen.kind == "cancelled" and not seen.finish_reason:
        return "" if tokens == answer.tokens[: len(tokens)] else "tokens before the cancellation differ"
    if tokens != answer.tokens:
        at = next((i for i, pair in enumerate(zip(tokens, answer.tokens, strict=False)) if pair[0] != pair[1]), None)
        return f"{len(tokens)} tokens instead of {len(answer.tokens)}" if at is None else f"token {at + 1} differs"
    if seen.text != answer.text if seen.content is None else seen.content != answer.content:
        return "the text differs"
    if wrong := _wrong_call(seen, answer):
        return wrong
    return "" if seen.finish_reason == answer.finish_reason else f"it ended as {seen.finish_reason!r}"


def _wrong_call(seen: RequestRecord, answer: ReferenceAnswer) -> str:
    """Returns the error in the tool calls of a whole answer; "" if none."""
    calls = [(call.name, call.arguments) for call in seen.calls]
    if len(calls) != len(answer.calls):
        return f"{len(calls)} calls instead of {len(answer.calls)}"
    for number, (call, right) in enumerate(zip(calls, answer.calls, strict=True), 1):
        if call != right:
            return f"{'the name' if call[0] != right.name else 'an argument'} of call {number} differs"
    if not all(call.id for call in seen.calls) or len({call.id for call in seen.calls}) < len(calls):
        return "its calls have no ids of their own"
    return "" if seen.read_again in (None, seen.calls) else "its calls are others when they are read again"


def judge(
    seen: Sequence[RequestRecord],
    answer: Callable[[int, str], ReferenceAnswer | None],
    faults: Sequence[Fault],
    *,
    seconds: float,
    interrupted: bool = False,
    runs: Iterable[Mapping[str, Any]] = (),
    troubles: Sequence[str] = (),
    inexact: Callable[[RequestRecord], Verdict | None] = lambda one: None,
) -> Report:
    """Judges all requests and returns the report.

    `answer` returns the right answer to the DrillRequest of a number (RequestRecord.number) for a fingerprint; None for
    an unknown one. `seconds` is the length of the drill; if it was `interrupted`, requests without an end are not lost.
    `runs` is as for `prompt_rows`, `troubles` as in Report. `inexact` returns the verdict on a request
    with nondeterministic bits, for which `answer` is not called; None for any other.
    """
    count: Counter[str] = Counter()
    served: Counter[Served] = Counter()
    wrong, unfinished, by = list[str](), list[str](), Counter[str]()
    for one in seen:
        kind = f"{one.kind}, choice {one.choice}" if one.several else one.kind
        name = f"{one.request_id or '(not accepted)'} ({kind})"
        count["accepted"] += bool(one.request_id)
        count["tokens"] += len(one.tokens)
        count["duplicated"] += one.repeated
        count["fallbacks"] += one.fallbacks
        count["choices"] += one.several
        count["calls"] += len(one.calls)
        if one.repeated:
            wrong.append(f"{name}: {one.repeated} events came twice")
        if one.ended is None and interrupted and not one.error:
            unfinished.append(one.request_id)
        elif not one.request_id:
            count["refused"] += 1
            wrong.append(f"{name}: {one.error or 'no answer'}")
        elif one.ended is None or (one.error and one.kind != "cancelled"):
            count["lost"] += 1
            wrong.append(f"{name}: {one.error or 'no end'}")
        elif (verdict := inexact(one) or Verdict(difference(one, answer))).wrong:
            count["beyond_tolerance" if verdict.beyond else "mismatched"] += 1
            wrong.append(f"{name}: {verdict.wrong}")
        else:
            count["completed"] += 1
            count[verdict.how] += 1
            by.update(re.sub(r"@\d+", "", fingerprint) for fingerprint in one.fingerprints)
            if one.fingerprints:
                served["handed_over" if one.fallbacks else "mixed" if verdict.on_gpu else "cpu"] += 1
    computed = prompt_rows(runs)
    return Report(
        **{name: count[name] for name in COUNTED},
        seconds=round(seconds, 1),
        interrupted=interrupted,
        unfinished=[request_id for request_id in unfinished if request_id],
        faults=dict(Counter((fault.kind, fault.target) for fault in faults)),
        recovery_s=_recoveries(seen, faults),
        answers=dict(by),
        served=dict(served),
        runs=computed.runs,
        reruns=computed.reruns,
        rows_needed=computed.needed + count["tokens"],
        rows_redone=computed.redone,
        troubles=troubles,
        wrong=[*wrong, *troubles],
    )


class PromptRows(NamedTuple):
    """The tokens that runs computed at their start, before the first new token."""

    runs: int
    """Runs of all requests."""
    reruns: int
    """Runs after the first of a request."""
    needed: int
    """Tokens computed by first runs."""
    redone: int
    """Tokens computed by later runs to reach the position of the run before."""


def prompt_rows(runs: Iterable[Mapping[str, Any]]) -> PromptRows:
    """Counts the tokens at the start of runs; `runs` is the data of every RUN_START in the workers' logs, in order.

    Each has `request_id`, and the numbers of tokens `prompt_tokens`, `committed` (new tokens before the run) and
    `found` (tokens of prefix hits).
    """
    started, needed, redone = Counter[str](), 0, 0
    for run in runs:
        rows = run["prompt_tokens"] + run["committed"] - run["found"]
        started[run["request_id"]] += 1
        if started[run["request_id"]] > 1:
            redone += rows - 1
        else:
            needed += rows
    return PromptRows(started.total(), started.total() - len(started), needed, redone)


def _recoveries(seen: Sequence[RequestRecord], faults: Sequence[Fault]) -> dict[Blow, list[float]]:
    """Returns the seconds from each fault to the next event of the streams that it concerned, by kind and target."""
    by_blow: dict[Blow, list[float]] = {}
    for fault in faults:
        for one in seen:
            if one.kind in ("background", "session") or one.started > fault.at or (one.ended or fault.at) < fault.at:
                continue
            later = next((at for at in one.events if at > fault.at), None)
            if later is None or not one.events or not _concerns(fault, one, later):
                continue
            by_blow.setdefault((fault.kind, fault.target), []).append(later - fault.at)
    return {blow: sorted(times) for blow, times in sorted(by_blow.items())}


def _concerns(fault: Fault, one: RequestRecord, later: float) -> bool:
    """True if the fault concerned a stream whose next event came at `later`."""
    if fault.target == "gateway":
        return any(fault.at < cut < later for cut in one.cuts)
    return fault.requests is None or own_id(one.request_id) in fault.requests


def show(report: Report, console: Console) -> None:
    """Prints the report on `console`: tables of its figures, then at most 20 errors."""
    rows: dict[str, object] = {
        "accepted": report.accepted,
        "completed": report.completed,
        "lost": report.lost,
        "mismatched": report.mismatched,
        "beyond tolerance": report.beyond_tolerance,
        "duplicated events": report.duplicated,
        "never accepted": report.refused,
        "tokens": f"{report.tokens} ({report.tokens / max(report.seconds, 1e-9):.0f}/s)",
        "of several choices": report.choices,
        "tool calls": report.calls,
        "runs": f"{report.runs}, {report.reruns} of them again",
        "rows redone": f"{100 * report.redone:.1f} % of those needed",
    }
    if report.compared or report.only_whole:
        rows |= {
            "within tolerance": report.compared,
            "whole, and drawn at random": report.only_whole,
            "fallbacks": report.fallbacks,
        }
    if any(name != "cpu" for name in report.served):
        all_of_them = sum(report.served.values())
        rows |= {
            f"served by {name.replace('_', ' ')}": f"{count} ({100 * count / all_of_them:.0f} %)"
            for name, count in sorted(report.served.items())
        }
    elif len(report.answers) > 1:
        rows |= {f"answers of {name}": count for name, count in sorted(report.answers.items())}
    if report.unfinished:
        rows["under way at the end"] = ", ".join(report.unfinished)
    console.print(facts_table(f"drill of {report.seconds:.0f} s", rows))
    table = Table("fault", "of", "times", "streams", "recovery p50", "p99", "longest")
    for blow, count in sorted(report.faults.items()):
        times = report.recovery_s.get(blow, ())
        figures = [f"{percentile(times, q):.2f} s" for q in (0.5, 0.99, 1.0)] if times else []
        table.add_row(*blow, str(count), str(len(times)), *figures)
    console.print(table)
    for line in report.wrong[:20]:
        console.print(f"wrong: {line}", highlight=False, markup=False)
    if len(report.wrong) > 20:
        console.print(f"and {len(report.wrong) - 20} more")
