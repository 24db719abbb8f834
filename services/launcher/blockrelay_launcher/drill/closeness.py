"""Measures how close answers are to reference logits, for nondeterministic devices and models: GPUs, and floats.

Every token of a greedy answer must be the best one after the same tokens, or within the model's tolerance of it. The
logits of a session's steps must be near the reference's. The reference runs in a process outside the drilled system.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from blockrelay_launcher.drill.clients import RequestRecord
from blockrelay_launcher.drill.workload import DrillRequest, asked_alone, incomplete


class Claim(NamedTuple):
    """The part of an answer that a reference can check."""

    number: int
    """Index of the request's DrillRequest, as RequestRecord.number."""
    given: tuple[int, ...] | tuple[str, ...]
    """The tokens of a greedy answer, or the digests of the logits of a session's steps."""


class Verdict(NamedTuple):
    """The verdict on the content of a request that ended."""

    wrong: str
    """The error in the content; empty: none."""
    beyond: bool = False
    """True if the error is a distance beyond the tolerance."""
    how: Literal["bits", "compared", "only_whole"] = "bits"
    """The comparison: bit by bit, with reference logits, or only for being complete."""
    on_gpu: bool = False
    """True if a GPU computed a part of it."""


def claim_of(requests: Sequence[DrillRequest], one: RequestRecord) -> Claim | None:
    """Returns what a reference can check of a request; None for a sampled answer and for one without content."""
    if one.kind == "session":
        return Claim(one.number, tuple(one.digests)) if one.digests else None
    greedy = requests[one.number].params.temperature == 0
    return Claim(one.number, tuple(one.tokens)) if greedy and one.tokens else None


def computed_by(fingerprints: Iterable[str], ids: Collection[str]) -> bool:
    """True if only workers with the numerics ids `ids` computed answers with these fingerprints.

    The fingerprint `a/b+c@17` names the ids of two stages (a, b), and of one (c) from token 18 on.
    """
    parts = (part for name in fingerprints for part in name.split("+"))
    return all(own in ids for part in parts for own in part.partition("@")[0].split("/"))


def longest_of(claims: Iterable[Claim]) -> dict[Claim, Claim]:
    """Maps each claim to the longest claim that begins with it (maybe itself), so that only those are checked."""
    by_claim: dict[Claim, Claim] = {}
    longest: Claim | None = None
    for claim in sorted(set(claims), reverse=True):  # a claim comes right after the ones that begin with it
        if longest is None or longest.number != claim.number or longest.given[: len(claim.given)] != claim.given:
            longest = claim
        by_claim[claim] = longest
    return by_claim


@dataclass(slots=True)
class Closeness:
    """Distances of answers from those of the reference `model`. Call `prepare` first.

    `logits` holds base64 of float16 logits by their digests.
    """

    model: Path
    requests: Sequence[DrillRequest]
    logits: Mapping[str, str]
    _tolerance: Mapping[str, float] = field(default_factory=dict[str, float], init=False)
    _off: dict[Claim, Sequence[float]] = field(default_factory=dict[Claim, Sequence[float]], init=False)

    def prepare(self, seen: Iterable[RequestRecord]) -> None:
        """Measures all answers in `seen` with the reference; it replaces the distances of an earlier call.

        Raises ServiceUnavailable if the reference fails.
        """
        whole = longest_of(claim for one in seen if (claim := claim_of(self.requests, one)) is not None)
        claims = sorted(set(whole.values()))
        if claims:
            self._tolerance, measured = _measured(self.model, [self._question(claim) for claim in claims])
            of = dict(zip(claims, measured, strict=True))
            self._off = {claim: of[longest][: len(claim.given)] for claim, longest in whole.items()}

    def verdict(self, one: RequestRecord, *, on_gpu: bool) -> Verdict:
        """Returns the verdict on a request that has ended and was given to `prepare`.

        `on_gpu`: a GPU computed a part of it.
        """
        claim = claim_of(self.requests, one)
        wrong = ""
        if one.kind != "session" and (one.kind != "cancelled" or one.finish_reason):
            wrong = incomplete(self.requests[one.number], len(one.tokens), one.finish_reason)
        beyond = "" if wrong or claim is None else self._beyond(claim, one)
        return Verdict(wrong or beyond, bool(beyond), "only_whole" if claim is None else "compared", on_gpu)

    def _beyond(self, claim: Claim, one: RequestRecord) -> str:
        """Returns a sentence on the first distance beyond the tolerance; "" if there is none."""
        of_rows = one.kind == "session"
        tolerance = self._tolerance["row" if of_rows else "token"]
        first = first_beyond(self._off[claim], tolerance)
        if first is None:
            return ""
        number, distance = first
        what = f"the logits of step {number} are off" if of_rows else f"token {number} is behind the best one"
        return f"{what} by {distance:.2g} of their length, and {tolerance:g} is tolerated"

    def _question(self, claim: Claim) -> dict[str, Any]:
        """Returns the JSON object with which the reference process checks a claim."""
        request = self.requests[claim.number]
        if not request.cuts:
            return {"prompt": request.prompt, "answer": claim.given, "params": request.params.to_dict()}
        logits = [self.logits[str(digest)] for digest in claim.given]
        return {"prompt": request.prompt, "cuts": request.cuts[: len(logits)], "logits": logits}


def first_beyond(off: Sequence[float], tolerance: float) -> tuple[int, float] | None:
    """Returns the number, from 1, and value of the first distance beyond the tolerance, or None. NaN is beyond it."""
    return next(((n, distance) for n, distance in enumerate(off, 1) if not distance <= tolerance), None)


def _measured(model: Path, questions: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, float], list[list[float]]]:
    """Runs the reference process and returns the model's tolerances and the distances for each question."""
    what = "the answers cannot be measured"
    head, *distances = map(json.loads, asked_alone("reference_logits", [model], questions, what))
    return head["tolerance"], [one["off"] for one in distances]
