"""Computes the figures of a benchmark from arrival times. Pure. Times are seconds of one clock."""

import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blockrelay_launcher.percentile import percentile

#: Draws as many random prompts as the first number says, of the length in the second one.
DrawPrompts = Callable[[int, int], list[list[int]]]


@dataclass(frozen=True, slots=True)
class Drawing:
    """How the tokens of a round are drawn. Each request has its index in the round as its seed."""

    temperature: float = 0.0
    top_p: float = 1.0


GREEDY = Drawing()


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a benchmark: requests that were sent at the same time, and the arrival of their tokens."""

    sent: float
    """Time at which all requests were sent."""
    tokens: Sequence[Sequence[float]]
    """Arrival times of the tokens of each request; at least two each."""
    client_cpu_s: float | None = None
    """CPU time of the measuring client; None without a client."""

    @property
    def prefill_s(self) -> float:
        """Seconds until every request has its first token."""
        return max(came[0] for came in self.tokens) - self.sent

    @property
    def total_s(self) -> float:
        """Seconds until the last token of all requests."""
        return max(came[-1] for came in self.tokens) - self.sent


def decode_rate(tokens: Sequence[Sequence[float]]) -> float:
    """Returns the tokens per second while all requests decode together: the sum of their rates.

    The time is from the last first token to the first last token. If a request has fewer than two arrivals in it (few
    tokens, many requests), the rates are those of the whole decoding. `tokens` holds arrival times by request.
    """
    first, last = max(came[0] for came in tokens), min(came[-1] for came in tokens)
    inside = [[t for t in came if first <= t <= last] for came in tokens]
    if any(len(came) < 2 or came[0] == came[-1] for came in inside):
        inside = [list(came) for came in tokens]
    return sum((len(came) - 1) / max(came[-1] - came[0], 1e-9) for came in inside)


def token_times(came: Sequence[float]) -> list[float]:
    """Returns the time of each token after the one before it, from arrival times.

    Tokens that came together, as with drafts, share the time since the last arrival evenly. The tokens of the first
    arrival have no time: if all tokens came together, the list is empty.
    """
    times: list[float] = []
    for (before, _), (at, group) in itertools.pairwise((at, list(group)) for at, group in itertools.groupby(came)):
        times += [(at - before) / len(group)] * len(group)
    return times


def figures(rounds: Sequence[Round], *, prompt: int) -> dict[str, Any]:
    """Returns one entry of the report: medians over rounds; percentiles are over all requests of all rounds.

    `rounds` has at least one, all with the same numbers of requests and tokens. `prompt` is the number of tokens of
    each prompt. The figures of the entry:
    `decode_tok_s`: see `decode_rate`. `prefill_ms`: time until every request has its first token. `prompt_tok_s`:
    prompt tokens per second of that time. `ttft_ms_p50`: time to first token. `itl_ms_...`: see `token_times`; None if
    all tokens came together. `tokens_at_once`: mean number of tokens per arrival. `tok_s`: new tokens per second of the
    whole round. `rounds`: the figures of each round. `client_cpu_s` and `client_cpu_share` (of the round's time): CPU
    time of the client; absent without a client. All rounds have a client, or none has.
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


def ratio(some: Sequence[Round], others: Sequence[Round], *, prompt: int) -> dict[str, Any]:
    """Returns the speed of some rounds as a share of that of others (1: equal), medians over pairs of rounds.

    Both sides have the same number of rounds. `prompt` is the number of tokens of each prompt. `decode` compares the
    rates of `decode_rate`, `prefill` the times until every request has its first token.
    """
    pairs = list(zip(some, others, strict=True))
    return {
        "requests": len(some[0].tokens),
        "prompt": prompt,
        "decode": round(statistics.median(decode_rate(a.tokens) / decode_rate(b.tokens) for a, b in pairs), 3),
        "prefill": round(statistics.median(b.prefill_s / a.prefill_s for a, b in pairs), 3),
    }


def random_prompts(dice: random.Random, vocab_size: int, requests: int, length: int) -> list[list[int]]:
    """Returns `requests` prompts of `length` random token ids, which share no beginning, so that none is a prefix hit.

    `dice` is the random source.
    """
    return [[dice.randrange(vocab_size) for _ in range(length)] for _ in range(requests)]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
