"""The ratios that Blockrelay has to reach, and their measured values in records. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.cases import sampled_ratio
from bench.records import Record, by_round, median, paired_ratio, reports_of, roofline_median, sides_of
from bench.units import ON_THE_FILE, OUR_PRECISIONS, OURS, OURS_SMALL, REAL

Records = Sequence[Record]
ONE_STAGE, WIDE_STAGES, THIN_STAGES = "1 stage, 2 threads", "2 stages, 2 threads each", "2 stages, 1 thread each"


@dataclass(frozen=True, slots=True)
class MeasuredRatio:
    """A measured ratio."""

    ratio: float
    note: str = ""
    """The figures or sides that it was computed from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A ratio to reach."""

    name: str
    floor: float
    """The value that is just good enough."""
    aim: float
    at_most: bool = False
    """True if smaller is better."""
    on_demand: str = ""
    """The part of the benchmark that measures it, if that part is measured on demand only."""
    find: Callable[[Records], MeasuredRatio | None]
    """Returns the measured ratio in records; None: it was not measured."""

    def verdict(self, ratio: float) -> str:
        """Returns the best goal that a ratio reaches: "aim" or "floor", else "below"."""
        reached = (lambda goal: ratio <= goal) if self.at_most else (lambda goal: ratio >= goal)
        return "aim" if reached(self.aim) else "floor" if reached(self.floor) else "below"


def against_best(
    figure: str, requests: int, prompt: int, *, peers: str = "", ours: Sequence[str] = (OURS,)
) -> Callable[[Records], MeasuredRatio | None]:
    """Finds the ratio of our best side to the best peer in a figure of one size (`requests`, tokens of `prompt`).

    Rates are ours over theirs, and times theirs over ours. Only peers with `peers` in their name count.
    """
    more = figure == "decode_tok_s"

    def find(records: Records) -> MeasuredRatio | None:
        def best(sides: Sequence[str]) -> str | None:
            values = {
                side: value
                for side in sides
                if (value := median(records, "peers", side, figure, requests=requests, prompt=prompt))
            }
            return (max if more else min)(values, key=lambda side: values[side], default=None)

        mine = best(ours)
        theirs = best([side for side in sides_of(records, "peers") if side not in OUR_PRECISIONS and peers in side])
        if mine is None or theirs is None:
            return None
        a, b = (
            by_round(records, "peers", side, figure, requests=requests, prompt=prompt)
            for side in ((mine, theirs) if more else (theirs, mine))
        )
        ratio = paired_ratio(a, b)
        return None if ratio is None else MeasuredRatio(ratio, f"{mine}; best peer: {theirs}")

    return find


def through_gateway(requests: int, what: str) -> Callable[[Records], MeasuredRatio | None]:
    """Finds the ratio of a speed through the gateway to that in process; `what` is decode or prefill.

    The figure is that of `requests` requests at once.
    """

    def find(records: Records) -> MeasuredRatio | None:
        for report in reports_of(records, "gateway"):
            for entry, ratio in zip(report["gateway"], report["ratio"], strict=True):
                if entry["requests"] == requests:
                    share = 100 * entry["client_cpu_share"]
                    return MeasuredRatio(ratio[what], f"measuring client: {share:.1f} % of one core")
        return None

    return find


def against_one_stage(sides: Sequence[str], figure: str, requests: int) -> Callable[[Records], MeasuredRatio | None]:
    """Finds the ratio of the best of `sides` to one stage with two threads, for `requests` requests at once."""

    def find(records: Records) -> MeasuredRatio | None:
        def rounds(side: str) -> dict[int, float]:
            return by_round(records, "stages", side, figure, requests=requests, prompt=128)

        one, ratios = rounds(ONE_STAGE), dict[str, float]()
        for side in sides:
            some = rounds(side)
            ratio = paired_ratio(some, one) if figure == "decode_tok_s" else paired_ratio(one, some)
            if ratio is not None:
                ratios[side] = ratio
        if not ratios:
            return None
        best = max(ratios, key=lambda side: ratios[side])
        return MeasuredRatio(ratios[best], best)

    return find


def step_by_position(records: Records) -> MeasuredRatio | None:
    """Returns the ratio of the time of a step at position 2000 to that at 100."""
    for report in reports_of(records, "position"):
        near, far = (entry["itl_ms_p50"] for entry in report["gateway"])
        return MeasuredRatio(far / near, f"{near:.1f} and {far:.1f} ms per step")
    return None


def seen_prefix(records: Records) -> MeasuredRatio | None:
    """Returns the ratio of the second request's time to first token to the first's, both with the same prefix."""
    for report in reports_of(records, "prefix"):
        prefix = report["prefix"]
        return MeasuredRatio(prefix["ratio"], f"{prefix['first_ttft_ms']:.0f} and {prefix['second_ttft_ms']:.0f} ms")
    return None


def of_kv_cache(figure: str, prompt: int) -> Callable[[Records], MeasuredRatio | None]:
    """Finds a ratio of the part `kv_cache`: with the cache to without, or of late steps to early ones with it.

    It comes from the part `distributor`, which measures the same, if `kv_cache` was not measured.
    """

    def find(records: Records) -> MeasuredRatio | None:
        for report in [*reports_of(records, "kv_cache"), *reports_of(records, "distributor")]:
            for entry in (one for one in report["kv_cache"] if one["prompt"] == prompt):
                both = [entry[name] for name in (f"{figure}_on_ms", f"{figure}_off_ms") if name in entry]
                times = f"{both[0]:.1f} and {both[1]:.1f} ms; " if both else ""
                return MeasuredRatio(entry[figure], f"{times}2 stages, prompt of {prompt}")
        return None

    return find


def own_memory(part: str) -> Callable[[Records], MeasuredRatio | None]:
    """Finds the ratio of the heaviest worker's RssAnon + RssShmem to its weights and KV pages in use."""

    def find(records: Records) -> MeasuredRatio | None:
        workers = [worker for report in reports_of(records, part) for worker in report["memory"]["workers"]]
        if not workers:
            return None
        worst = max(workers, key=lambda w: w["ratio"])
        own = (worst["rss_anon"] + worst["rss_shmem"]) / 1e6
        note = f"{own:.0f} MB over {worst['weights'] / 1e6:.0f} + {worst['kv'] / 1e6:.0f} MB"
        return MeasuredRatio(worst["ratio"], f"{note}; peak with mapped files {worst['peak_rss'] / 1e6:.0f}")

    return find


def sampled(records: Records) -> MeasuredRatio | None:
    """Returns how fast 16 streams of sampled tokens come beside greedy ones, of the real model."""
    ratio = sampled_ratio(records, "sampled", OURS, 16)
    return None if ratio is None else MeasuredRatio(ratio, f"{REAL}, temperature 0.6, top-p 0.9")


def on_the_file(records: Records) -> MeasuredRatio | None:
    """Returns our best decode rate of one request of the real model over that of llama.cpp on the same file."""
    theirs = by_round(records, "real", ON_THE_FILE[1], "decode_tok_s", requests=1, prompt=128)
    sides = {
        side: paired_ratio(by_round(records, "real", side, "decode_tok_s", requests=1, prompt=128), theirs)
        for side in OUR_PRECISIONS
    }
    found = {side: ratio for side, ratio in sides.items() if ratio is not None}
    best = max(found, key=lambda side: found[side], default=None)
    return None if best is None else MeasuredRatio(found[best], best)


def of_roofline(case: str, requests: int, prompt: int) -> Callable[[Records], MeasuredRatio | None]:
    """Finds the time that the machine needs for a step, or for a prompt, over the time that it takes in w8a8."""

    def find(records: Records) -> MeasuredRatio | None:
        at = (case, requests, prompt)
        figures = [roofline_median(records, OURS, at, ("step", name)) for name in ("ratio", "needed_ms", "seen_ms")]
        ratio, needed, seen = figures
        if ratio is None or needed is None or seen is None:
            return None
        return MeasuredRatio(ratio, f"{needed:.1f} and {seen:.1f} ms")

    return find


TARGETS = (
    Target(
        name="decode, 16 requests, vs the best peer", floor=1.4, aim=2.0, find=against_best("decode_tok_s", 16, 128)
    ),
    Target(name="decode, 4 requests, vs the best peer", floor=1.3, aim=1.8, find=against_best("decode_tok_s", 4, 128)),
    Target(
        name="the same, w4a8",
        floor=1.3,
        aim=1.8,
        find=against_best("decode_tok_s", 4, 128, ours=(OURS_SMALL,)),
    ),
    Target(
        name="decode, 1 request, in any precision, vs the best peer",
        floor=0.85,
        aim=1.2,
        find=against_best("decode_tok_s", 1, 128, ours=tuple(OUR_PRECISIONS)),
    ),
    Target(name="prompt of 128 vs the best peer", floor=1.0, aim=1.4, find=against_best("prefill_ms", 1, 128)),
    Target(name="16 prompts of 128 vs the best peer", floor=1.5, aim=2.0, find=against_best("prefill_ms", 16, 128)),
    Target(
        name="prompt of 2048 vs onnxruntime-genai",
        floor=3.0,
        aim=6.0,
        find=against_best("prefill_ms", 1, 2048, peers="onnxruntime-genai"),
    ),
    Target(
        name="decode through the gateway vs in process, 1 request",
        floor=0.93,
        aim=0.98,
        find=through_gateway(1, "decode"),
    ),
    Target(
        name="decode through the gateway vs in process, 16 requests",
        floor=0.93,
        aim=0.98,
        find=through_gateway(16, "decode"),
    ),
    Target(name="prompt, the same, 1 request", floor=0.93, aim=0.98, find=through_gateway(1, "prefill")),
    Target(name="prompts, the same, 16 requests", floor=0.93, aim=0.98, find=through_gateway(16, "prefill")),
    Target(
        name="2 stages vs 1 stage, decode, 16 requests",
        floor=0.90,
        aim=0.95,
        find=against_one_stage([WIDE_STAGES, THIN_STAGES], "decode_tok_s", 16),
    ),
    Target(
        name="2 stages vs 1 stage, 16 prompts",
        floor=0.90,
        aim=0.95,
        find=against_one_stage([WIDE_STAGES, THIN_STAGES], "prefill_ms", 16),
    ),
    Target(
        name="2 one-thread stages vs 1 two-thread worker, 16 prompts",
        floor=0.85,
        aim=0.95,
        find=against_one_stage([THIN_STAGES], "prefill_ms", 16),
    ),
    Target(
        name="the same, decode, 16 requests",
        floor=0.5,
        aim=0.7,
        find=against_one_stage([THIN_STAGES], "decode_tok_s", 16),
    ),
    Target(
        name="the same, decode, 1 request",
        floor=0.5,
        aim=0.7,
        find=against_one_stage([THIN_STAGES], "decode_tok_s", 1),
    ),
    Target(name="step at position 2000 vs 100", floor=1.15, aim=1.08, at_most=True, find=step_by_position),
    Target(
        name="first token after a prefix of 1024 seen before vs not",
        floor=0.15,
        aim=0.05,
        at_most=True,
        find=seen_prefix,
    ),
    Target(name="KV cache vs none, 20 tokens", floor=1.8, aim=4.0, find=of_kv_cache("whole", 64)),
    Target(name="the same, a step", floor=3.0, aim=6.0, find=of_kv_cache("step", 64)),
    Target(
        name="the same, first token of a session's second step",
        floor=10.0,
        aim=15.0,
        find=of_kv_cache("second_step", 512),
    ),
    Target(
        name="step of tokens 41 to 50 vs 11 to 20",
        floor=1.05,
        aim=1.0,
        at_most=True,
        find=of_kv_cache("growth", 64),
    ),
    Target(name="sampled over greedy, 16 streams of the public model", floor=0.95, aim=0.98, find=sampled),
    Target(
        name="decode, 1 request of the public model, vs llama.cpp on the same file",
        floor=1.0,
        aim=1.3,
        find=on_the_file,
    ),
    Target(name="step of 1 row over its roofline", floor=0.85, aim=0.95, find=of_roofline("decode", 1, 128)),
    Target(name="step of 16 rows, the same", floor=0.75, aim=0.9, find=of_roofline("decode", 16, 128)),
    Target(name="prompt of 2048, the same", floor=0.6, aim=0.8, find=of_roofline("prompt", 1, 2048)),
    Target(name="memory of a worker, llama1b", floor=1.3, aim=1.1, at_most=True, find=own_memory("memory")),
    Target(
        name="memory of a worker, llama8b",
        floor=1.3,
        aim=1.1,
        at_most=True,
        on_demand="llama8b",
        find=own_memory("llama8b"),
    ),
)
