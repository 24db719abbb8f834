"""What a drill does and when is drawn from its seed alone."""

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from blockrelay.errors import UsageError
from blockrelay.protocol.plan import split_text
from blockrelay_launcher.drill.faults import (
    KINDS,
    LASTS_S,
    ROLES,
    Strike,
    other_borders,
    parse_names,
    possible,
    strikes,
)
from blockrelay_launcher.drill.options import DrillOptions


def drawn(count: int, seed: int = 1) -> list[Strike]:
    return list(islice(strikes(Random(seed), kinds=KINDS, roles=ROLES, every_s=2.0), count))


def test_a_seed_tells_all_of_it() -> None:
    assert drawn(50) == drawn(50) != drawn(50, seed=2)


def test_every_kind_meets_everybody_it_can() -> None:
    found = Counter((strike.kind, strike.target) for strike in drawn(2000))
    servers = {"redis-control", "redis-payload"}
    assert {target for kind, target in found if kind in ("full", "cut")} == servers
    everybody = {"worker", "scheduler", "gateway", "device", *servers}
    for kind in ("kill", "stop"):
        assert {target for met, target in found if met == kind} == everybody


def test_faults_come_as_often_and_last_as_long_as_they_should() -> None:
    found = drawn(2000)
    assert 1.9 < sum(strike.after_s for strike in found) / len(found) < 2.1
    for strike in found:
        least, most = LASTS_S.get(strike.kind, (0.0, 0.0))
        assert least <= strike.lasts_s <= most and 0 <= strike.pick < 1
    assert {strike.everybody for strike in found if strike.kind == "cut"} == {True, False}


def test_only_a_redis_is_full_or_cuts() -> None:
    assert possible(("kill", "full"), ("worker",)) == {"kill": ["worker"]}
    assert possible(("full", "cut"), ("worker", "gateway")) == {}
    assert possible(KINDS, ()) == {}


def test_borders_are_drawn_anew_and_every_stage_has_a_block() -> None:
    rng, before = Random(1), "1-3,4-5"
    seen = {split_text(other_borders(rng, 5, 2, before)) for _ in range(100)}
    assert seen == {"1-1,2-5", "1-2,3-5", "1-4,5-5"}


def test_plans_change_only_where_a_drill_has_stages_and_no_plan_of_its_own() -> None:
    options = DrillOptions(model=Path("m"), stages=2)
    assert options.replans and not replace(options, stages=1).replans
    assert not replace(options, faults="kill").replans and replace(options, faults="replan").replans
    assert not any(replace(options, **{name: Path("p")}).replans for name in ("plan", "apply", "blocks"))  # pyright: ignore
    assert possible(("replan",), ROLES) == {}, "nobody is hurt"


def test_pages_swap_only_where_it_is_asked_for_and_cpus_have_them() -> None:
    options = DrillOptions(model=Path("m"))
    assert not options.swaps
    asked = replace(options, faults="kill,swap")
    assert asked.swaps and not replace(asked, gpu="cpu").swaps and not replace(asked, blocks=Path("b")).swaps


def test_ranks_die_only_where_it_is_asked_for_and_cpus_have_them() -> None:
    asked = DrillOptions(model=Path("m"), faults="kill,rank")
    assert not DrillOptions(model=Path("m")).loses_ranks and asked.loses_ranks
    assert not replace(asked, gpu="cpu").loses_ranks and not replace(asked, blocks=Path("b")).loses_ranks


def test_names_are_read_and_a_wrong_one_is_told() -> None:
    assert parse_names(" cut,kill", "--faults", KINDS) == ("kill", "cut") and parse_names("", "--faults", KINDS) == ()
    assert parse_names("redis, worker", "--kill", ROLES) == ("worker", "redis")
    with pytest.raises(UsageError, match="kill, stop, full, cut, replan, precision, degrade, swap, rank with commas"):
        parse_names("kill,flood", "--faults", KINDS)


def test_stages_of_onnx_blocks_share_a_process_of_the_cpu() -> None:
    options = DrillOptions(model=Path("m"), stages=3, replicas=2)
    assert options.workers == [f"worker-{n}" for n in range(1, 7)]
    assert replace(options, blocks=Path("b")).workers == ["worker-1", "worker-2"]
