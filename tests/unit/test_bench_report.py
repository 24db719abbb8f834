"""`make bench` apart from the measuring: which units, what is stored, what the page says."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import published
from bench.compare import chosen_parts, chosen_sides, opened_store, write_pages
from bench.environments import PEERS, last_line
from bench.records import Record, Store, by_round, faults, median, paired_ratio
from bench.report import PLOT_NAME, markdown, plot
from bench.targets import TARGETS, THIN_STAGES, WIDE_STAGES
from bench.units import (
    ON_DEMAND,
    ON_THE_FILE,
    OUR_PRECISIONS,
    OUR_RUNS,
    OURS,
    OURS_SMALL,
    PARTS,
    SCENARIOS,
    WORDS,
    all_units,
)

DOCS = Path(__file__).parents[2] / "docs"
MACHINE: dict[str, Any] = {
    "cpu": "Abacus", "flags": ["avx2"], "cores": 2, "memory_gib": 4.0, "system": "Linux", "python": "3.11",
    "versions": {"numpy": "2"},
}  # fmt: skip
RUNNER_UP, BEST = "slow int4", "quick int4"


def entry(requests: int, prompt: int, *, decode: float, prefill: float, itl: float = 1.0) -> dict[str, Any]:
    return {
        "requests": requests, "prompt": prompt, "decode_tok_s": decode, "prefill_ms": prefill, "ttft_ms_p50": prefill,
        "itl_ms_p50": itl, "itl_ms_p99": itl, "client_cpu_s": 0.1, "client_cpu_share": 0.02,
    }  # fmt: skip


def record(
    part: str, side: str, *, number: int = 0, error: str = "", machine: dict[str, Any] = MACHINE, **outcome: Any
) -> Record:
    at = "2030-01-02T03:04:05"
    return Record(part=part, side=side, round=number, at=at, error=error, machine=machine, **outcome)


def report(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "llama1b", "gateway": list(entries), "in_process": [], "ratio": [], **more}


def every_part() -> list[Record]:
    """Figures of which every ratio can be told in the head."""
    sizes = [(1, 128), (4, 128), (16, 128), (1, 2048)]
    worker = {"rss_anon": 150e6, "rss_shmem": 10e6, "weights": 80e6, "kv": 20e6, "peak_rss": 3e8, "ratio": 1.6}
    ours = [entry(r, p, decode=30.0 * r, prefill=100.0) for r, p in sizes]
    pair = [entry(r, 128, decode=9.0, prefill=20.0) for r in (1, 16)]
    inside = [entry(r, 128, decode=10.0, prefill=19.0) for r in (1, 16)]
    for one in inside:
        del one["client_cpu_s"], one["client_cpu_share"]
    ratios = [{"requests": r, "prompt": 128, "decode": 0.9, "prefill": 0.95} for r in (1, 16)]
    stages = dict.fromkeys(OUR_RUNS["stages"], 100.0) | {WIDE_STAGES: 96.0, THIN_STAGES: 60.0}
    return [
        record("peers", OURS, reports=[report(*ours)]),
        record("peers", OURS_SMALL, reports=[report(entry(1, 128, decode=36.0, prefill=200.0))]),
        record("peers", BEST, figures=[entry(r, p, decode=20.0 * r, prefill=150.0) for r, p in sizes]),
        record("peers", RUNNER_UP, figures=[entry(r, p, decode=1.0, prefill=999.0) for r, p in sizes]),
        record("peers", "absent bf16", error="no such | wheel"),
        record("gateway", OURS, reports=[{**report(*pair), "in_process": inside, "ratio": ratios}]),
        *(
            record("stages", side, reports=[report(*(entry(r, 128, decode=d, prefill=6000 / d) for r in (1, 16)))])
            for side, d in stages.items()
        ),
        record(
            "position",
            OURS,
            reports=[report(*(entry(1, p, decode=1, prefill=1, itl=i) for p, i in ((100, 50.0), (2000, 55.0))))],
        ),
        record(
            "prefix",
            OURS,
            reports=[report(prefix={"first_ttft_ms": 1000, "second_ttft_ms": 40, "ratio": 0.04})],
        ),
        record("kv_cache", OURS, reports=[report(kv_cache=[kv_cache(64), kv_cache(512)])]),
        record("memory", OURS, reports=[report(memory={"ready_s": 3, "workers": [worker]})]),
        *(
            record("real", side, reports=[report(*(entry(r, 128, decode=d, prefill=50.0) for r in (1, 4, 16)))])
            for side, d in ((OURS, 80.0), (OURS_SMALL, 120.0))
        ),
        record("real", ON_THE_FILE[1], figures=[entry(1, 128, decode=100.0, prefill=60.0)]),
        record("sampled", OURS, reports=[sampled(0.97)]),
        record("vocabulary", WORDS[0], reports=[sampled(0.99)]),
        record("vocabulary", WORDS[1], reports=[sampled(0.9)]),
        record("sizes", OURS, reports=[report(entry(1, 8192, decode=20.0, prefill=16384.0))]),
        *(record("roofline", OURS, number=n, reports=[report(roofline=roofline(1 + n))]) for n in range(3)),
        record("distributor", OURS, reports=[distributor()]),
    ]


def sampled(share: float) -> dict[str, Any]:
    """What `blockrelay bench --sampled` reports."""
    ratios = [{"requests": r, "prompt": 128, "gateway": {"decode_tok_s": 9.0, "ratio": share}} for r in (1, 16)]
    return report(*(entry(r, 128, decode=10.0 * r, prefill=9.0) for r in (1, 16)), sampled=ratios)


def roofline(slower: int) -> dict[str, Any]:
    """What `blockrelay bench --roofline` reports: steps that take `slower` times as long as they need."""
    part = {"needed_ms": 20.0, "seen_ms": 20.0 * slower, "ratio": 1 / slower, "bound": "memory"}
    sizes = [("decode", 1, 128), ("decode", 16, 128), ("prompt", 1, 2048)]
    cases = [
        {"case": case, "requests": requests, "prompt": prompt, "layers": part, "head": part, "step": part}
        for case, requests, prompt in sizes
    ]
    peaks = {"memory_gb_s": 10.0 * slower, "byte_gmac_s": 400.0, "float_gmac_s": 100.0}
    return {"kernels": "abacus", **peaks, "cases": cases}


def kv_cache(prompt: int) -> dict[str, Any]:
    times = {f"{what}_{side}_ms": 1.0 for what in ("whole", "step", "second_step") for side in ("on", "off")}
    times |= {"early_step_ms": 30.0, "late_step_ms": 30.3}
    return {"prompt": prompt, "new": 20, "whole": 5.0, "step": 8.0, "second_step": prompt, "growth": 1.01, **times}


def distributor(**changed: Any) -> dict[str, Any]:
    """What `bench.scenarios.distributor` reports."""
    workers = [{"rss_anon": 650e6, "rss_shmem": 10e6}, {"rss_anon": 700e6, "rss_shmem": 20e6}]
    return {
        **report(entry(1, 64, decode=25.0, prefill=222.0), precision="w8a8", kv_cache=[kv_cache(64)]),
        "memory": {"ready_s": 4.5, "workers": workers}, "parts": 2, "threads": 2, "load_s": 2.25, "split_s": 0.0012,
        "weights_s": 1.5, "init_s": 0.31, "hop_s": 0.00014, "copy_s": 9e-6, "same": True, "requests": 25, **changed,
    }  # fmt: skip


def test_the_sides_of_a_part_take_turns() -> None:
    peers = [unit.side for unit in all_units(["peers"], rounds=3)]
    first, others = peers[: peers.index(OURS, 1)], peers[peers.index(OURS, 1) :]
    assert len(first) == len(OUR_PRECISIONS) + sum(len(peer.precisions) for peer in PEERS)
    assert others == 2 * [*OUR_PRECISIONS, *(f"{peer.title} {peer.contender}" for peer in PEERS if peer.contender)]
    stages = [(unit.round, unit.side) for unit in all_units(["stages"], rounds=2)]
    assert stages == [(number, side) for number in (0, 1) for side in OUR_RUNS["stages"]]


def test_every_unit_is_one() -> None:
    units = list(all_units(PARTS))
    assert len({unit.key for unit in units}) == len(units) == len(set(units))
    assert all([bool(unit.runs), bool(unit.peer), bool(unit.scenario)].count(True) == 1 for unit in units)
    assert all(peer.contender in (*peer.precisions, "") for peer in PEERS)


def test_parts_and_sides_are_chosen_by_name() -> None:
    assert chosen_parts("") == [part for part in PARTS if part not in ON_DEMAND]
    assert chosen_parts("peers,llama8b") == ["peers", "llama8b"]
    with pytest.raises(ValueError, match="speed"):
        chosen_parts("speed")
    assert {unit.side for unit in filter(chosen_sides("blockrelay,llama"), all_units(["peers"]))} == {
        OURS, OURS_SMALL, "llama.cpp q4_0", "llama.cpp q8_0",
    }  # fmt: skip


def test_what_was_measured_is_found_again_on_the_same_machine_only(tmp_path: Path) -> None:
    path = tmp_path / "docs" / "benchmarks.json"
    store = Store.open(path)
    for one in every_part():
        store.put(one)
    again = record("peers", BEST, figures=[entry(1, 128, decode=7, prefill=7)])
    store.put(again)
    found = Store.open(path).records
    assert [r.key for r in found].count(again.key) == 1 and again in found
    assert len(found) == len(every_part())
    assert all(one.machine == MACHINE for one in found)
    store.put(record("peers", BEST, number=1, figures=[entry(1, 128, decode=8, prefill=8)]))
    store.forget({(again.part, again.side)})
    assert (again.part, again.side) not in {(r.part, r.side) for r in store.records}, "of no round"
    assert store.records


def test_documents_get_figures_only_where_that_is_asked_for(tmp_path: Path) -> None:
    docs, work = tmp_path / "docs", tmp_path / ".bench"
    before = record("peers", BEST, figures=[entry(1, 128, decode=7, prefill=7)])
    Store.open(docs / "benchmarks.json").put(before)
    own = opened_store(publish=False, docs=docs, work=work)
    assert own.records == [], "what others have measured is none of this machine's"
    newer = replace(before, at="2999-01-01T00:00:00+00:00", machine={**MACHINE, "cpu": "Quipu"})
    own.put(newer)
    write_pages(own)
    assert {path.name for path in work.iterdir()} == {"benchmarks.json", "benchmarks.md", PLOT_NAME}
    assert Store.open(docs / "benchmarks.json").records == [before] and len(list(docs.iterdir())) == 1
    published = opened_store(publish=True, docs=docs, work=work)
    assert published.records == [newer] and published.path.parent == docs
    own.put(replace(newer, at="2000-01-01T00:00:00+00:00"))
    assert opened_store(publish=True, docs=docs, work=work).records == [newer], "an older one is none to publish"


def test_figures_of_a_part_are_of_one_machine_and_those_of_others_stay(tmp_path: Path) -> None:
    path, other = tmp_path / "benchmarks.json", {**MACHINE, "cpu": "Quipu", "cores": 64}
    store = Store.open(path)
    for one in every_part():
        store.put(one)
    store.move_to(MACHINE, PARTS)
    assert len(store.records) == len(every_part()), "nobody else has measured"
    store.move_to(other, ["kv_cache"])
    assert {one.part for one in every_part()} - {one.part for one in store.records} == {"kv_cache"}
    store.put(record("kv_cache", OURS, reports=[report(kv_cache=[kv_cache(64)])], machine=other, busy=0.42))
    found = Store.open(path).records
    assert {one.part: one.machine["cpu"] for one in found} == dict.fromkeys(
        (one.part for one in every_part()), "Abacus"
    ) | {"kv_cache": "Quipu"}
    assert len(json.loads(path.read_text())["machines"]) == 2

    page = markdown(found)
    others = ", ".join(part for part in PARTS if part not in ("kv_cache", *ON_DEMAND))
    assert f"- {others}: Abacus, 2 cores" in page
    assert "- kv_cache: Quipu, 64 cores" in page
    busy, quiet = (next(line for line in page.splitlines() if name in line) for name in ("Quipu", "Abacus"))
    assert "Other work took up to 42 % of the cores" in busy and "Other work" not in quiet


def test_the_distributors_table_has_both_columns() -> None:
    rows = {row.name: (row.theirs, *row.ours) for row in published.rows([distributor()], kv_cache(512))}
    assert rows["load the whole model"] == ("3.5 s", "2.25 s")
    assert rows["split it into two parts"] == ("1.2 s", "1.2 ms")
    assert rows["weights of both parts"] == ("2.8 s", "1.50 s")
    assert rows["init: here every block gives its known answer"] == ("0.5 s", "0.31 s")
    assert rows["memory of a part"] == ("4.5 GB", "0.66 and 0.72 GB")
    assert rows["20 tokens, KV cache and none"] == ("0.84 s, 1.55 s: 1.8x", "0.001 s, 0.001 s: 5.0x")
    assert rows["a step, cache and none"] == ("0.015 s, 0.045 s: 3.0x", "0.001 s, 0.001 s: 8.0x")
    assert rows["first token, cache warm and none"][1].endswith(": 64.0x; behind 512 tokens 0.001 s, 0.001 s: 512.0x")
    assert rows["first token of a new prompt"] == ("-", "0.222 s behind 64 tokens")
    assert rows["a step early and late in 50 tokens"] == ("0.019 s, 0.014 s: 0.73", "0.03 s, 0.0303 s: 1.01")
    assert rows["hop between parts"] == ("under 1 ms", "0.14 ms; in one process 0.009 ms")
    assert rows["new tokens/s, one request"] == ("19.8", "25.0")
    assert rows["output of the parts equals that of the whole"] == ("yes", "yes, bit by bit")
    assert rows["failed requests"] == ("0", "0 of 25")
    assert "**no**" in published.table([record("distributor", OURS, reports=[distributor(same=False)])])
    assert published.plain(distributor()).splitlines()[1].split("  ")[-1] == "2.25 s"


def test_a_model_on_demand_has_a_column_once_it_was_measured() -> None:
    page = markdown(every_part())
    assert "| here: 1.1B parameters, w8a8, 2 workers of 2 threads |" in page
    assert 'Llama-2-7B\'s shape: on demand, by `make bench ARGS="--only llama2_7b"`.' in page
    seven = record("llama2_7b", OURS, reports=[distributor(load_s=9.0)])
    page = markdown([*every_part(), seven])
    assert "| here: Llama-2-7B's shape, w8a8, 2 workers of 2 threads |" in page and "on demand, by" not in page
    assert "| load the whole model | 3.5 s | 2.25 s | 9.00 s |" in page
    page = markdown([one for one in every_part() if one.part not in SCENARIOS])
    assert '1.1B parameters: not measured yet, by `make bench ARGS="--only distributor"`.' in page
    assert "| load the whole model | 3.5 s |\n" in page, "theirs alone"


def test_figures_are_medians_and_ratios_are_of_the_same_round() -> None:
    rounds = [
        record("peers", OURS, number=n, figures=[entry(1, 128, decode=d, prefill=1)]) for n, d in enumerate((3, 9, 5))
    ]
    assert median(rounds, "peers", OURS, "decode_tok_s", requests=1, prompt=128) == 5
    assert median(rounds, "peers", OURS, "decode_tok_s", requests=2, prompt=128) is None
    ours = by_round(rounds, "peers", OURS, "decode_tok_s", requests=1, prompt=128)
    assert paired_ratio(ours, {0: 1.0, 1: 9.0, 2: 1.0}) == 3
    assert paired_ratio(ours, {7: 1.0}) is None


def test_every_ratio_is_found() -> None:
    found = {target.name: target.find(every_part()) for target in TARGETS}
    ratios = {name: round(one.ratio, 3) for name, one in found.items() if one}
    assert ratios == {
        "decode, 16 requests, vs the best peer": 1.5,
        "decode, 4 requests, vs the best peer": 1.5,
        "decode, 1 request, in any precision, vs the best peer": 1.8,
        "prompt of 128 vs the best peer": 1.5,
        "16 prompts of 128 vs the best peer": 1.5,
        "decode through the gateway vs in process, 1 request": 0.9,
        "decode through the gateway vs in process, 16 requests": 0.9,
        "prompt, the same, 1 request": 0.95,
        "prompts, the same, 16 requests": 0.95,
        "2 stages vs 1 stage, decode, 16 requests": 0.96,
        "2 stages vs 1 stage, 16 prompts": 0.96,
        "2 one-thread stages vs 1 two-thread worker, 16 prompts": 0.6,
        "the same, decode, 16 requests": 0.6,
        "the same, decode, 1 request": 0.6,
        "step at position 2000 vs 100": 1.1,
        "first token after a prefix of 1024 seen before vs not": 0.04,
        "KV cache vs none, 20 tokens": 5.0,
        "the same, a step": 8.0,
        "the same, first token of a session's second step": 512.0,
        "step of tokens 41 to 50 vs 11 to 20": 1.01,
        "sampled over greedy, 16 streams of the public model": 0.97,
        "decode, 1 request of the public model, vs llama.cpp on the same file": 1.2,
        "step of 1 row over its roofline": 0.5,
        "step of 16 rows, the same": 0.5,
        "prompt of 2048, the same": 0.5,
        "memory of a worker, llama1b": 1.6,
    }
    assert all(target.find([]) is None for target in TARGETS)
    alone = [target.name for target in TARGETS if target.find([record("distributor", OURS, reports=[distributor()])])]
    assert alone == ["KV cache vs none, 20 tokens", "the same, a step", "step of tokens 41 to 50 vs 11 to 20"]


def test_verdicts_know_which_way_is_better() -> None:
    more = next(target for target in TARGETS if not target.at_most)
    less = next(target for target in TARGETS if target.at_most)
    assert [more.verdict(more.aim), more.verdict(more.floor), more.verdict(more.floor / 2)] == ["aim", "floor", "below"]
    assert [less.verdict(less.aim), less.verdict(less.floor), less.verdict(less.floor * 2)] == ["aim", "floor", "below"]


def test_the_page_says_everything() -> None:
    page = markdown(every_part())
    assert "| quick int4 | 20.0 / 80.0 / 320 | 150 | 150 | 150 |" in page
    assert "**Blockrelay w8a8**, through the gateway | 30.0 / 120 / 480 | 100 | 100 | 100 |" in page
    assert "| absent bf16 | not measured: no such \\| wheel |" in page
    assert (
        "| decode, 16 requests, vs the best peer | 1.50 | 1.4 | 2 | floor reached | Blockrelay w8a8; best peer" in page
    )
    assert "| Blockrelay w4a8 | 120 / 120 / 120 | 50.0 / 50.0 / 50.0 |" in page
    assert "| llama.cpp, the file as it is | 100 / - / - | 60.0 / - / - |" in page
    assert "| SmolLM2-135M-Instruct, Blockrelay w8a8 | 10.0 / 160 | 0.970 / 0.970 |" in page
    assert "| 1.1B parameters, 128,256 words | 10.0 / 160 | 0.900 / 0.900 |" in page
    assert "| 1 x 8192 | 20.0 | 16384 | 500 |" in page
    assert "| step of 1 row over its roofline | 0.50 | 0.85 | 0.95 | **missed** | 20.0 and 40.0 ms |" in page
    assert "| Blockrelay w8a8: decode, 16 x 128 | 20.0 / 40.0 | 20.0 / 40.0 | 20.0 / 40.0 | 0.50 |" in page
    assert "All threads read 30.0 GB/s from memory" in page, "the best of all rounds"
    assert "| memory of a worker, llama1b | 1.60 | <= 1.3 | <= 1.1 | **missed** |" in page
    assert '| memory of a worker, llama8b | on demand: `make bench ARGS="--only llama8b"` |' in page
    assert "Abacus, 2 cores" in page
    assert "not measured" in markdown([])


def test_the_plot_is_a_picture_of_every_side() -> None:
    picture = ElementTree.fromstring(plot(every_part()))
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count(OURS) == texts.count(BEST) == 6 and texts.count(OURS_SMALL) == 2


def test_the_last_words_of_a_failure_are_its_error() -> None:
    assert last_line("a\nerror: no wheel\n\nnote: try again\n") == "error: no wheel"
    assert last_line("") == "nothing was printed"


@pytest.mark.skipif(not (DOCS / "benchmarks.json").exists(), reason="nothing was measured yet")
def test_the_committed_page_is_made_of_the_committed_figures() -> None:
    store = Store.open(DOCS / "benchmarks.json")
    assert (DOCS / "benchmarks.md").read_text() == markdown(store.records), "make bench ARGS='--report --publish'"
    assert (DOCS / "benchmarks.svg").read_text() == plot(store.records)


def test_a_figure_that_cannot_be_is_an_error_by_name_and_no_row() -> None:
    wrong = {"precision": "int8", "requests": 1, "prompt": 2048, "prefill_ms": 9362.8, "decode_tok_s": -293.25}
    told = {"precision": "int8", "requests": 4, "prompt": 128, "error": "7 tokens behind the first took -0.024 s"}
    records = [
        *every_part(),
        record("peers", "odd int8", figures=[entry(1, 128, decode=7.0, prefill=9.0), wrong, told]),
    ]
    assert faults(records[-1]) == [
        "1 x 2048: impossible: decode_tok_s -293.25",
        "4 x 128: 7 tokens behind the first took -0.024 s",
    ]
    page = markdown(records)
    assert "| odd int8 | 7.0 / - / - | 9.0 | - | - |" in page
    assert "| odd int8 | error: round 1, 1 x 2048: impossible: decode_tok_s -293.25 |" in page
    for value in (0.0, -1.0, float("nan"), float("inf")):
        assert faults(record("gateway", OURS, reports=[report(entry(1, 128, decode=value, prefill=1.0))]))
        assert faults(record("gateway", OURS, reports=[report(entry(1, 128, decode=1.0, prefill=value))]))
    assert not [line for one in every_part() for line in faults(one)]


def test_a_peer_that_tells_whole_times_only_is_measured_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a long prompt, reading varies by more than a few tokens take: one pair alone may say less than nothing."""
    spec = importlib.util.spec_from_file_location("protocol", DOCS.parent / "bench" / "peers" / "protocol.py")
    assert spec is not None and spec.loader is not None
    protocol = importlib.util.module_from_spec(spec)
    sys.modules["protocol"] = protocol  # a dataclass looks its module up
    spec.loader.exec_module(protocol)
    options = protocol.Options(DOCS, DOCS, ((1, 2048, 8),), ("int8",), 2, convert_only=False)

    def printed(times: list[float]) -> dict[str, Any]:
        left = iter(times)
        protocol.measure_whole(options, "int8", lambda requests, prompt, new: next(left))  # pyright: ignore
        assert not list(left)
        return json.loads(capsys.readouterr().out)

    assert printed([9.0, 9.4, 9.2, 9.0, 9.7, 9.1, 9.8])["decode_tok_s"] == 10.0
    impossible = printed([9.0, 9.4, 9.2, 9.3, 9.1, 9.1, 9.8])
    assert "decode_tok_s" not in impossible and "-0.200 s" in impossible["error"]
