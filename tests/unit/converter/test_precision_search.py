"""`convert --budget-perplexity`: the search, and a model that really predicts."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import UsageError
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_converter.mixing.budget import parse_budget
from blockrelay_converter.mixing.search import Mix, cheapest
from tests.support.models.restored_checkpoint import restore_checkpoint

pytestmark = pytest.mark.thorough

CONVERTER = [sys.executable, "-m", "blockrelay_converter"]
EVALUATE = [sys.executable, "-m", "blockrelay_worker.offline.evaluate"]
TEXT = (
    "One winter day, Amy and Lily wanted to play. The wind was blowing. Lily was in the tunnel. Amy was in the hall. "
    "The shell was in the field. The colour of the shell was black. The spoon was with Lily. The colour of the spoon "
    "was yellow. Amy had five berries. First Amy found one berry. Now Amy had six berries. Then Amy ran to the tunnel. "
    "Now Amy was in the tunnel. It was nice in the tunnel. Next, Amy ate three berries. Now Amy had three berries. "
    'After that, Lily gave the spoon to Amy. Now the spoon was with Amy. "Here you are," said Lily. Soon Amy lost two '
    "berries. Now Amy had one berry. Later, Amy bought four berries. Now Amy had five berries. At last Amy lost one "
    'berry. Now Amy had four berries. "What a lovely day!" said Amy. The end.\n'
)


def mix(changed: set[int], blocks: int) -> Mix:
    return tuple("w4a8" if index in changed else "w8a8" for index in range(1, blocks + 1))


def test_all_blocks_change_at_once_where_the_budget_allows_it() -> None:
    asked: list[Mix] = []

    def measure(precisions: Mix) -> float:
        asked.append(precisions)
        return 3.0

    found = cheapest(mix(set(), 3), mix({1, 2, 3}, 3), [1, 1, 1], limit=3.0, measure=measure)

    assert found is not None
    assert found.precisions == mix({1, 2, 3}, 3)
    assert len(asked) == 2


def test_a_base_beyond_the_limit_finds_nothing() -> None:
    assert cheapest(mix(set(), 2), mix({1, 2}, 2), [1, 1], limit=2.9, measure=lambda _: 3.0) is None


def test_blocks_that_save_most_for_their_cost_change_first() -> None:
    costs = {1: 0.5, 2: 0.1, 3: 0.3}

    def measure(precisions: Mix) -> float:
        return 3.0 + sum(costs[index] for index, each in enumerate(precisions, 1) if each == "w4a8")

    # Block 1 costs most, and saves so much that it is still the best; block 3 no longer fits, block 2 does.
    found = cheapest(mix(set(), 3), mix({1, 2, 3}, 3), [100, 1, 10], limit=3.65, measure=measure)

    assert found is not None
    assert found.precisions == mix({1, 2}, 3)
    assert found.costs == pytest.approx(costs)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=6), st.integers(0, 12))
def test_what_is_found_is_within_the_limit_and_no_further_block_fits(blocks: list[tuple[int, int]], limit: int) -> None:
    def measure(precisions: Mix) -> float:
        return sum(cost for (cost, _), each in zip(blocks, precisions, strict=True) if each == "w4a8")

    count = len(blocks)
    everything = mix(set(range(1, count + 1)), count)
    found = cheapest(mix(set(), count), everything, [saved for _, saved in blocks], limit=limit, measure=measure)

    assert found is not None
    assert measure(found.precisions) == found.perplexity <= limit
    changed = {index for index, each in enumerate(found.precisions, 1) if each == "w4a8"}
    for index in set(range(1, count + 1)) - changed:
        assert measure(mix(changed | {index}, count)) > limit
    best = max(
        sum(blocks[index - 1][1] for index in chosen)
        for size in range(count + 1)
        for chosen in itertools.combinations(range(1, count + 1), size)
        if measure(mix(set(chosen), count)) <= limit
    )
    largest = max(saved for _, saved in blocks)
    assert sum(blocks[index - 1][1] for index in changed) >= best - largest


def test_a_budget_is_a_share() -> None:
    assert parse_budget("0.5%") == pytest.approx(0.005)
    assert parse_budget("0%") == 0
    for text in ("0.5", "-1%", "%", "nan%", "inf%", "much"):
        with pytest.raises(UsageError, match="write a share such as"):
            parse_budget(text)


def run(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, check=False, env={**os.environ, **options})


def test_the_mix_is_within_its_budget_smaller_than_w8a8_and_exact(tmp_path: Path) -> None:
    checkpoint = restore_checkpoint(BUNDLED_MODEL, tmp_path / "story")
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text(TEXT)
    options = ["--text", str(text), "--tokens", "200"]

    done = run(*CONVERTER, str(checkpoint), str(out), "--budget-perplexity", "0.1%", *options)

    assert done.returncode == 0, done.stderr
    report = json.loads((out / "precisions.json").read_text())
    folder = open_block_folder(out)
    assert folder.manifest.exact
    assert set(folder.manifest.precisions) == {"w8a8", "w4a8"}
    assert report["precision"] == folder.manifest.precision
    assert report["perplexity"] <= 1.001 * report["reference"]
    assert set(report["costs"]) == {f"block_{index}" for index in range(1, 8)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "story", "text"]
    assert not (out / "parts").exists()

    # And that is what anybody measures, beside the model as it was
    again = run(*EVALUATE, "--model", str(out), "--against", str(BUNDLED_MODEL), *options, "--json")
    measured = json.loads(again.stdout)
    assert measured["perplexity"] == pytest.approx(report["perplexity"], abs=1e-9)
    assert measured["cost"] == pytest.approx(measured["perplexity"] / measured["against"]["perplexity"] - 1)
    assert measured["against"]["precision"] == "w8a8"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget-perplexity", "1%"], "--budget-perplexity and --text FILE go together"),
        (["--text", "TEXT"], "--budget-perplexity and --text FILE go together"),
        (["--budget-perplexity", "1%", "--text", "TEXT", "--precision", "w8a8"], "leave out --precision"),
        (["--budget-perplexity", "1%", "--text", "TEXT", "--no-known-answers"], "needs their known answers"),
        (["--budget-perplexity", "1%", "--text", "absent"], "absent: "),
        (["--budget-perplexity", "a little", "--text", "TEXT"], "write a share such as 0.5%"),
        (["--precision", "w8a8,block_9=fp32"], "precision 'block_9=fp32': the model has block_1 to block_7"),
        (["--precision", "int3"], "precision 'int3': 'int3' is none of w8a8, w4a8, fp32"),
        (["--precision", ""], "precision '': '' is none of"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, options: list[str], message: str) -> None:
    checkpoint = restore_checkpoint(BUNDLED_MODEL, tmp_path / "story")
    (tmp_path / "TEXT").write_text(TEXT)
    done = subprocess.run(
        [*CONVERTER, "story", "out", *options], capture_output=True, text=True, check=False, cwd=checkpoint.parent
    )
    assert done.returncode == 2
    assert done.stderr.startswith("blockrelay: ") and message in done.stderr and done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["TEXT", "story"]
