"""A real draft model that guesses for runs, and what happens when it fails, is slow or computes nonsense."""

from collections.abc import Callable, Sequence

import pytest
from prometheus_client import CollectorRegistry

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import ExecutionError
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.execution.batch import Batch, StageOutput
from blockrelay_worker.execution.cpu.loading import CpuExecutors
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.fault_injection import WrappingExecutor
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.offline.pipeline import Pipeline, generate
from blockrelay_worker.runs.run import Run
from blockrelay_worker.sampling.row_sampler import sampler_of
from blockrelay_worker.scheduling.step_cost import StepCost
from blockrelay_worker.speculation.draft_guesser import DraftGuesser, prices
from blockrelay_worker.speculation.draft_model import FEW, LONG_CALLS, DraftModel
from blockrelay_worker.speculation.loading import load_guesser
from tests.support.models.planted_overflow import OVERFLOWING, overflowing_model
from tests.support.worker.runs import GREEDY, new_run

SAMPLED = SamplingParams(max_tokens=100, temperature=0.9, top_p=0.95)


class Draft:
    """A draft model over the whole folder, its guesser, and a clock that stands still unless a test moves it."""

    def __init__(
        self,
        folder: BlockFolder,
        *,
        pages: int = 40,
        context: int = 512,
        fixed: int | None = 4,
        broken: Callable[[Executor], Executor] = lambda executor: executor,
    ) -> None:
        self.now = 0.0
        whole = CpuExecutors(1).load(folder, 1, folder.model.blocks, pages=pages)
        self.pool = whole.pool
        self.model = DraftModel(broken(whole), sampler_of(load_kernels(1)), context=context, clock=lambda: self.now)
        self.metrics = WorkerMetrics(CollectorRegistry())
        self.guesser = DraftGuesser(self.model, self.metrics, fixed=fixed, clock=lambda: self.now)

    def step(self, runs: Sequence[Run], limit: int = 4) -> list[list[int]]:
        """Guesses for all runs, as a batch of theirs is made."""
        self.guesser.look(runs)
        if not self.guesser.count(runs, StepCost()):
            return [[] for _ in runs]
        return self.guesser.guess([(run, limit) for run in runs])

    @property
    def guessed(self) -> float:
        return self.metrics.draft_model_tokens._value.get()  # pyright: ignore

    @property
    def right(self) -> float:
        return self.metrics.draft_model_accepted_tokens._value.get()  # pyright: ignore


class Failing(WrappingExecutor):
    """Fails from the given call on."""

    def __init__(self, executor: Executor, *, after: int, error: Exception) -> None:
        super().__init__(executor)
        self.left, self.error = after, error

    def run(self, batch: Batch) -> StageOutput:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().run(batch)


def a_run(name: str, prompt: Sequence[int], params: SamplingParams = GREEDY) -> Run:
    """A run whose prompt is computed but for its last token, as one that decodes."""
    run = new_run(name, prompt, params=params)
    run.kv.pages = [0] * (len(prompt) // 16 + 10)  # those of the served model, which nothing here reads
    run.tokens_computed(len(prompt) - 1)
    return run


def of_the_model(folder: BlockFolder, run: Run, count: int) -> list[int]:
    """The next tokens that the model itself would choose."""
    pipeline = Pipeline(folder, stages=1, threads=1, tokens=512)
    params = SamplingParams(
        max_tokens=count, temperature=run.params.temperature, top_p=run.params.top_p, ignore_eos=True
    )
    return list(generate(pipeline, tuple(run.tokens), params, seed=run.seed, tokenizer=None).tokens)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_it_guesses_what_the_very_same_model_chooses(w8a8: BlockFolder, params: SamplingParams) -> None:
    draft = Draft(w8a8)
    runs = [a_run("p", [5, 6, 7, 8], params), a_run("q", list(range(10, 80)), params)]
    expected = [of_the_model(w8a8, run, 12) for run in runs]
    guesses: list[list[int]] = []
    for _ in range(3):  # a long prompt is caught up with in chunks
        guesses = draft.step(runs)
    assert guesses == [tokens[:4] for tokens in expected]
    for run, tokens in zip(runs, expected, strict=True):
        run.learn(tokens[:5])  # all are right, and one more was sampled behind them
    assert draft.step(runs) == [tokens[5:9] for tokens in expected]
    assert draft.right >= 8
    for run, tokens in zip(runs, expected, strict=True):
        run.learn([*tokens[5:7], 3])  # the third guess was wrong
    assert draft.step(runs) == [of_the_model(w8a8, run, 4) for run in runs], "KV of wrong guesses is not read"


def test_pages_are_free_when_runs_have_gone_or_lost_theirs(w8a8: BlockFolder) -> None:
    draft = Draft(w8a8)
    gone, preempted, stays = (a_run(name, [5, 6, 7]) for name in ("gone", "preempted", "stays"))
    draft.step([gone, preempted, stays])
    assert draft.pool.used_pages == 3 and draft.model.runs_held == 3
    preempted.kv.release()
    draft.guesser.look([preempted, stays])
    assert draft.pool.used_pages == 1 and draft.model.runs_held == 1
    another = a_run("stays", [5, 6, 7])  # of the same request
    draft.guesser.look([another])
    assert draft.pool.used_pages == 0
    draft.step([another])
    draft.guesser.close()
    assert draft.pool.used_pages == 0
    draft.pool.check_integrity()
    assert draft.step([another]) == [[]], "a closed one guesses nothing"


def test_without_pages_or_context_there_are_no_guesses(w8a8: BlockFolder) -> None:
    small = Draft(w8a8, pages=2)
    assert [len(guesses) for guesses in small.step([a_run("p", [5] * 16), a_run("q", [6] * 16)])] == [4, 0]
    short = Draft(w8a8, context=20)
    runs = [a_run("p", [5] * 16), a_run("q", [6] * 18), a_run("r", [7] * 20), a_run("s", [8] * 30)]
    assert [len(guesses) for guesses in short.step(runs)] == [4, 2, 0, 0]


@pytest.mark.parametrize(
    "error", [ExecutionError("block_2 failed"), MemoryError("no memory"), RuntimeError("a defect"), KeyError("x")]
)
def test_an_error_ends_all_guesses_and_frees_everything(w8a8: BlockFolder, error: Exception) -> None:
    draft = Draft(w8a8, broken=lambda executor: Failing(executor, after=5, error=error))
    run = a_run("p", [5, 6, 7])
    assert len(draft.step([run])[0]) == 4
    run.learn([9])
    assert draft.step([run]) == [[]]
    assert draft.pool.used_pages == 0
    assert draft.step([run]) == [[]] and draft.guesser.count([run], StepCost()) == 0


def test_calls_that_take_too_long_too_often_end_all_guesses(w8a8: BlockFolder) -> None:
    draft = Draft(w8a8)

    class Slow(WrappingExecutor):
        def run(self, batch: Batch) -> StageOutput:
            draft.now += 0.3
            return super().run(batch)

    draft = Draft(w8a8, broken=Slow)
    run = a_run("p", [5, 6, 7])
    for _ in range(LONG_CALLS - 1):
        assert len(draft.step([run])[0]) == 1, "the first call exceeds what all of them may take"
        run.learn([9])
    assert draft.step([run]) == [[]] and draft.guesser.count([run], StepCost()) == 0


def test_a_run_that_becomes_nan_gets_no_more_guesses_and_others_do(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = overflowing_model(tmp_path_factory.mktemp("overflowing"), "w8a8", block=3)
    draft = Draft(folder)
    bad, good = a_run("bad", [7, OVERFLOWING]), a_run("good", [7, 8])
    guesses = draft.step([bad, good])
    assert guesses[0] == [] and len(guesses[1]) == 4
    bad.learn([9])
    good.learn([9])
    guesses = draft.step([bad, good])
    assert guesses[0] == [] and len(guesses[1]) == 4


def test_a_prompt_that_costs_more_than_its_answer_is_worth_is_not_computed(w8a8: BlockFolder) -> None:
    draft = Draft(w8a8, fixed=None)
    long_one = a_run("p", [5] * 300, SamplingParams(max_tokens=2, temperature=0))
    assert draft.model.lacks(long_one) > FEW
    draft.guesser.look([long_one])
    assert draft.guesser.count([long_one], StepCost()) == 0, "nothing is guessed before a trial"
    assert draft.pool.used_pages == 0


def test_prices_are_shares_of_a_step() -> None:
    cost = StepCost(by_tokens={1: 0.01, 2: 0.011, 4: 0.014, 8: 0.03})
    shares = prices(cost, 1, 0.002, 0.02)
    assert shares.call == pytest.approx(0.1)
    assert shares.steps[1] == pytest.approx(1.1) and shares.steps[3] == pytest.approx(1.4)
    assert shares.steps[2] == pytest.approx(1.1), "of three tokens, which were never measured: as of two"
    assert shares.steps[8] == pytest.approx(3.0)
    assert prices(StepCost(), 1, 0.002, 0.02).steps == {}


def test_a_model_that_cannot_be_loaded_is_left_out(w8a8: BlockFolder) -> None:
    metrics = WorkerMetrics(CollectorRegistry())
    loaded = load_guesser(w8a8, metrics, threads=1, pages=4, fixed=None)
    assert loaded is not None
    loaded.close()
    assert load_guesser(w8a8, metrics, threads=1, pages=1 << 60, fixed=None) is None, "no such memory"
