"""From arrival times to figures. Pure. Times in seconds of one clock, results in the units of their names."""

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockrelay_launcher.percentile import percentile


@dataclass(frozen=True, slots=True)
class Round:
    """All requests of a round were sent at `sent`; `tokens[i]` are the times at which request i's tokens came.

    Every request has at least two tokens. `client_cpu_s` is the CPU time of the measuring process, None where nobody
    measures from outside.
    """

    sent: float
    tokens: Sequence[Sequence[float]]
    client_cpu_s: float | None = None

    @property
    def prefill_s(self) -> float:
        """Until the last of the first tokens."""
        return max(came[0] for came in self.tokens) - self.sent

    @property
    def total_s(self) -> float:
        return max(came[-1] for came in self.tokens) - self.sent


def decode_rate(tokens: Sequence[Sequence[float]]) -> float:
    """Tokens per second while all requests decode together.

    That is from the last first token to the first last token; the rates that the requests have in it are added up.
    Where a request has fewer than two tokens in it (few tokens, many requests), the whole decoding of all counts.
    """
    first, last = max(came[0] for came in tokens), min(came[-1] for came in tokens)
    inside = [[t for t in came if first <= t <= last] for came in tokens]
    if any(len(came) < 2 or came[0] == came[-1] for came in inside):
        inside = [list(came) for came in tokens]
    return sum((len(came) - 1) / max(came[-1] - came[0], 1e-9) for came in inside)


def token_times(came: Sequence[float]) -> list[float]:
    """What each token took after the one before it. Several that came together, as where workers guess tokens ahead,
    share the time since the last ones evenly."""
    times: list[float] = []
    for (before, _), (at, group) in itertools.pairwise((at, list(group)) for at, group in itertools.groupby(came)):
        times += [(at - before) / len(group)] * len(group)
    return times


def figures(rounds: Sequence[Round], *, prompt: int) -> dict[str, Any]:
    """One entry of the report: medians over rounds; waiting times are of all requests of all rounds.

    `decode_tok_s` as `decode_rate`; `prefill_ms` until every request has its first token; `prompt_tok_s` from it;
    `itl_ms_...` as `token_times`, None where all tokens came together; `tokens_at_once` how many come together, on
    average; `tok_s` all new tokens over the whole time; `rounds` how far apart the rounds were.
    """
    requests = len(rounds[0].tokens)
    decode = [decode_rate(one.tokens) for one in rounds]
    prefill = [one.prefill_s for one in rounds]
    first = [came[0] - one.sent for one in rounds for came in one.tokens]
    gaps = [gap for one in rounds for came in one.tokens for gap in token_times(came)]
    arrivals = sum(len(set(came)) for one in rounds for came in one.tokens)
    new = len(rounds[0].tokens[0])
    entry: dict[str, Any] = {
        "requests": requests,
        "prompt": prompt,
        "new": new,
        "decode_tok_s": round(statistics.median(decode), 2),
        "prefill_ms": _ms(statistics.median(prefill)),
        "prompt_tok_s": round(requests * prompt / statistics.median(prefill), 1),
        "ttft_ms_p50": _ms(percentile(first, 0.5)),
        "itl_ms_p50": _ms(percentile(gaps, 0.5)) if gaps else None,
        "itl_ms_p99": _ms(percentile(gaps, 0.99)) if gaps else None,
        "tokens_at_once": round(sum(len(came) for one in rounds for came in one.tokens) / arrivals, 2),
        "tok_s": round(statistics.median(requests * new / one.total_s for one in rounds), 2),
        "rounds": {"decode_tok_s": [round(r, 2) for r in decode], "prefill_ms": [_ms(p) for p in prefill]},
    }
    cpu = [one.client_cpu_s for one in rounds if one.client_cpu_s is not None]
    if cpu:
        entry["client_cpu_s"] = round(statistics.median(cpu), 4)
        entry["client_cpu_share"] = round(statistics.median(c / r.total_s for c, r in zip(cpu, rounds, strict=True)), 4)
    return entry


def ratio(gateway: Sequence[Round], in_process: Sequence[Round], *, prompt: int) -> dict[str, Any]:
    """What of the speed in process arrives through the gateway (1: all of it), as medians over rounds run in pairs."""
    pairs = list(zip(gateway, in_process, strict=True))
    return {
        "requests": len(gateway[0].tokens),
        "prompt": prompt,
        "decode": round(statistics.median(decode_rate(g.tokens) / decode_rate(i.tokens) for g, i in pairs), 3),
        "prefill": round(statistics.median(i.prefill_s / g.prefill_s for g, i in pairs), 3),
    }


def random_prompts(dice: random.Random, vocab_size: int, requests: int, length: int) -> list[list[int]]:
    """Prompts of token ids that share no beginning, so that no cache helps."""
    return [[dice.randrange(vocab_size) for _ in range(length)] for _ in range(requests)]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
