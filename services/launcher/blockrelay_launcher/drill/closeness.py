"""How close answers are to reference logits, for devices and models whose runs differ in bits: GPUs, and floats.

Every token of a greedy answer must be the best one, or within the model's tolerance of it, behind the same tokens; the
logits of a session's steps must be near the reference's. The reference is a process that has no part in the system.
"""

import json
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from blockrelay.errors import ServiceUnavailable
from blockrelay_launcher.drill.clients import Seen
from blockrelay_launcher.drill.workload import Ask, incomplete


class Claim(NamedTuple):
    """What a client was given, as far as a reference can tell what it is worth: the tokens of a greedy answer to the
    ask of this number, or the digests of the logits of its steps."""

    ask: int
    given: tuple[int, ...] | tuple[str, ...]


class Verdict(NamedTuple):
    """What is wrong with the content of a request that ended; "" when nothing is. `beyond`: that it is beyond the
    tolerance. `how` it was compared: bit by bit, within a tolerance, or not at all, but for being whole. `on_gpu`: a
    GPU had a part in it."""

    wrong: str
    beyond: bool = False
    how: Literal["bits", "tolerance", "whole"] = "bits"
    on_gpu: bool = False


def claim_of(asks: Sequence[Ask], one: Seen) -> Claim | None:
    """None for what was drawn at random, and for a request that was given nothing."""
    if one.kind == "session":
        return Claim(one.ask, tuple(one.digests)) if one.digests else None
    greedy = asks[one.ask].params.temperature == 0
    return Claim(one.ask, tuple(one.tokens)) if greedy and one.tokens else None


def computed_by(fingerprints: Iterable[str], ids: Collection[str]) -> bool:
    """Whether only workers with these numerics ids had a part in answers: `a/b+c@17` names those of two stages, and of
    one from token 18 on."""
    parts = (part for name in fingerprints for part in name.split("+"))
    return all(own in ids for part in parts for own in part.partition("@")[0].split("/"))


def longest_of(claims: Iterable[Claim]) -> dict[Claim, Claim]:
    """For each claim one that it is, or that begins with it and is no beginning of another."""
    found: dict[Claim, Claim] = {}
    longest: Claim | None = None
    for claim in sorted(set(claims), reverse=True):  # right before a beginning comes what it is the beginning of
        if longest is None or longest.ask != claim.ask or longest.given[: len(claim.given)] != claim.given:
            longest = claim
        found[claim] = longest
    return found


@dataclass(slots=True)
class Closeness:
    """Distances of claims from the reference `model`. `logits`: base64 of float16 by digest. Call `prepare` first."""

    model: Path
    asks: Sequence[Ask]
    logits: Mapping[str, str]
    _tolerance: Mapping[str, float] = field(default_factory=dict[str, float], init=False)
    _off: dict[Claim, Sequence[float]] = field(default_factory=dict[Claim, Sequence[float]], init=False)

    def prepare(self, seen: Iterable[Seen]) -> None:
        """Ask the reference about all that these were given. Raises ServiceUnavailable."""
        whole = longest_of(claim for one in seen if (claim := claim_of(self.asks, one)) is not None)
        claims = sorted(set(whole.values()))
        if claims:
            self._tolerance, measured = _measured(self.model, [self._asked(claim) for claim in claims])
            of = dict(zip(claims, measured, strict=True))
            self._off = {claim: of[longest][: len(claim.given)] for claim, longest in whole.items()}

    def verdict(self, one: Seen, *, on_gpu: bool) -> Verdict:
        """On a request that ended."""
        claim = claim_of(self.asks, one)
        if one.kind != "session" and (one.kind != "cancelled" or one.finish_reason):
            wrong = incomplete(self.asks[one.ask], len(one.tokens), one.finish_reason)
        else:
            wrong = ""
        beyond = "" if wrong or claim is None else self._beyond(claim, one)
        return Verdict(wrong or beyond, bool(beyond), "whole" if claim is None else "tolerance", on_gpu)

    def _beyond(self, claim: Claim, one: Seen) -> str:
        """What is beyond the tolerance; "" for nothing."""
        of_rows = one.kind == "session"
        tolerance = self._tolerance["row" if of_rows else "token"]
        found = first_beyond(self._off[claim], tolerance)
        if found is None:
            return ""
        number, distance = found
        what = f"the logits of step {number} are off" if of_rows else f"token {number} is behind the best one"
        return f"{what} by {distance:.2g} of their length, and {tolerance:g} is tolerated"

    def _asked(self, claim: Claim) -> dict[str, Any]:
        ask = self.asks[claim.ask]
        if not ask.cuts:
            return {"prompt": ask.prompt, "answer": claim.given}
        logits = [self.logits[str(digest)] for digest in claim.given]
        return {"prompt": ask.prompt, "cuts": ask.cuts[: len(logits)], "logits": logits}


def first_beyond(off: Sequence[float], tolerance: float) -> tuple[int, float] | None:
    """The first of these distances that is not within the tolerance, as what is no number never is, and its number,
    from 1."""
    return next(((n, distance) for n, distance in enumerate(off, 1) if not distance <= tolerance), None)


def _measured(model: Path, asked: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, float], list[list[float]]]:
    """The tolerances of a model and the distances of all that is asked about, by a process of its own."""
    lines = "".join(json.dumps(one) + "\n" for one in asked)
    argv = [sys.executable, "-P", "-m", "blockrelay_worker.offline.reference_logits", str(model)]
    done = subprocess.run(argv, input=lines, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServiceUnavailable(f"the answers cannot be measured: {done.stderr.strip().splitlines()[-1:]}")
    told, *found = [json.loads(line) for line in done.stdout.splitlines()]
    return told["tolerance"], [one["off"] for one in found]
