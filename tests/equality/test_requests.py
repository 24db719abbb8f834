"""Law of the whole system: every answer is that of the request's solo run in a fresh process, whatever it met."""

import os
import random
import signal
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.settings import BUNDLED_MODEL
from blockrelay.text.tokenizer import Tokenizer
from tests.support.systems.equality_crowd import ask_in_waves, worker_counters
from tests.support.systems.equality_workload import Asked, make_workload
from tests.support.systems.solo_runs import Answer, solo_answers
from tests.support.systems.up_process import running_up
from tests.support.waiting import wait_until
from tests.support.worker.vandal import vandal


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the system under test is cut. `kv_bytes` None leaves room for everything at once.

    `tiers`: pages are also stored in a folder and on Redis, and broken there now and then. `kill`: one worker dies.
    """

    stages: int
    threads: int
    replicas: int = 1
    kv_bytes: int | None = None
    tiers: bool = False
    kill: bool = False

    def __str__(self) -> str:
        names = {"tight": self.kv_bytes, "tiers": self.tiers, "kill": self.kill}
        words = [
            f"{self.stages}x{self.replicas}",
            f"threads{self.threads}",
            *(n for n, is_so in names.items() if is_so),
        ]
        return "-".join(words)


#: Bytes of 16 tokens of the bundled model in all layers.
PAGE_BYTES = 49152
#: A little more than one of the longest requests, which are 48 pages, and just one of them: many more are under way at
#: once, and at least nine give way in every run (with 80 pages, some runs of two hundred requests had none).
TIGHT, TIGHTEST = 56 * PAGE_BYTES, 50 * PAGE_BYTES

SHAPES = [
    Shape(stages=1, threads=1, kv_bytes=TIGHT),
    Shape(stages=1, threads=2),
    Shape(stages=2, threads=2, kv_bytes=TIGHT),
    Shape(stages=3, threads=1),
    Shape(stages=1, threads=1, replicas=2, kv_bytes=TIGHT, kill=True),
    Shape(stages=1, threads=2, kv_bytes=TIGHT, tiers=True),
    Shape(stages=2, threads=1, replicas=2, kv_bytes=TIGHT, tiers=True, kill=True),
]
#: Of the folder, and of Redis: pages leave both while others come.
TIER_BYTES = 32 << 20


@pytest.mark.timeout(300)
def test_twenty_random_requests_are_answered_as_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks, shape = workload(20, seed=1), Shape(stages=1, threads=2, kv_bytes=TIGHTEST)
    answers, counted = answers_of(shape, asks, tmp_path, monkeypatch)
    assert_equal(asks, answers, solo_answers(BUNDLED_MODEL, asks))
    assert_it_was_no_solo_run(shape, counted)  # twenty may happen to fit without anybody giving way


@pytest.fixture(scope="module")
def crowd() -> tuple[list[Asked], list[Answer]]:
    """Two hundred requests and their solo answers."""
    asks = workload(200, seed=2)
    assert min(len(asked.prompt) for asked in asks) == 1 and max(len(asked.prompt) for asked in asks) == 600
    return asks, solo_answers(BUNDLED_MODEL, asks)


@pytest.mark.equality
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_hundred_random_requests_are_answered_as_alone(
    crowd: tuple[list[Asked], list[Answer]], shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks, expected = crowd
    answers, counted = answers_of(shape, asks, tmp_path, monkeypatch)
    assert_equal(asks, answers, expected)
    assert_it_was_no_solo_run(shape, counted)
    if shape.kv_bytes and shape.stages == shape.replicas == 1:
        assert counted["blockrelay_worker_num_preemptions_total"] > 0, "runs give way"


def workload(count: int, *, seed: int) -> list[Asked]:
    folder = open_block_folder(BUNDLED_MODEL, blocks=[])
    assert folder.tokenizer_path is not None
    tokenizer = Tokenizer.from_file(folder.tokenizer_path)
    return make_workload(count, seed=seed, tokenizer=tokenizer, vocab=folder.model.vocab_size)


def answers_of(
    shape: Shape, asks: list[Asked], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Answer], "Counter[str]"]:
    """Answers of a real system, and what its workers counted. It ends cleanly."""
    pages = folder / "pages"
    settings = {"kv_bytes": shape.kv_bytes}
    if shape.tiers:
        settings |= {"page_store_folder": pages, "page_store_bytes": TIER_BYTES, "page_store_redis_bytes": TIER_BYTES}
    for name, value in settings.items():
        if value is not None:
            monkeypatch.setenv(f"BLOCKRELAY_{name.upper()}", str(value))
    options = ("--stages", str(shape.stages), "--replicas", str(shape.replicas), "--threads", str(shape.threads))
    with running_up(BUNDLED_MODEL, *options, data=folder / "data") as up:
        before_kill: Counter[str] = Counter()
        workers = up.pid_of("blockrelay_worker")

        def kill_one() -> None:
            before_kill.update(worker_counters(up))
            pid = random.Random(len(asks)).choice(up.pid_of("blockrelay_worker"))
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: pid not in up.pid_of("blockrelay_worker"), "the worker is gone")

        halfway = kill_one if shape.kill else lambda: None
        with vandal(up, pages) if shape.tiers else nullcontext():
            answers = ask_in_waves(up.url, asks, seed=len(asks), halfway=halfway)
        counters = before_kill or worker_counters(up)
        # A worker that fell over our bug would be replaced, and every answer still be right.
        assert shape.kill or up.pid_of("blockrelay_worker") == workers
        assert up.stop() == 0
    return answers, counters


def assert_it_was_no_solo_run(shape: Shape, counted: "Counter[str]") -> None:
    """What could have gone wrong has happened."""
    batches = counted["blockrelay_worker_iteration_tokens_count"]
    assert counted["blockrelay_worker_iteration_tokens_sum"] > 2 * batches, "batches mix requests"
    assert counted["blockrelay_worker_prefix_cache_hits_total"] > 0, "pages are found"
    accepted, drafted = (
        counted[f"blockrelay_worker_spec_decode_num_{name}_tokens_total"] for name in ("accepted", "draft")
    )
    assert 0 < accepted < drafted, "guesses are right and wrong"
    if shape.kv_bytes:
        assert counted["blockrelay_worker_prefix_cache_evictions_total"] > 0, "pages are given up"
    if shape.tiers:
        for tier in ("shm", "redis"):
            assert counted[f'blockrelay_worker_page_store_hits_total{{tier="{tier}"}}'] > 0, f"pages come from {tier}"
        assert counted["blockrelay_worker_page_store_trouble_total"] > 0, "broken pages are seen"


def assert_equal(asks: list[Asked], answers: list[Answer], expected: list[Answer]) -> None:
    """Equal to the last bit; otherwise says which requests differ and where."""
    wrong = [
        f"{asked.name}: {len(asked.prompt)} tokens, {asked.params}, stream={asked.stream}: "
        f"differs from token {_first_difference(got.tokens, alone.tokens)} of {len(alone.tokens)} on\n"
        f"   got {replace(got, logprobs=None)}\n alone {replace(alone, logprobs=None)}"
        for asked, got, alone in zip(asks, answers, expected, strict=True)
        if got != alone
    ]
    assert not wrong, f"{len(wrong)} of {len(asks)} differ:\n" + "\n".join(wrong[:5])


def _first_difference(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
