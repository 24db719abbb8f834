"""ACCEPT's limits on a real server: what is refused and why, when to ask again, and that nothing is left behind."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockrelay.protocol.capabilities import Pace
from blockrelay.protocol.transitions import calls
from blockrelay.protocol.transitions.calls import Limits
from tests.support.cell import MODEL, Cell, begin_cell, body
from tests.support.waiting import wait_until

PUNCTUAL = Limits(enforce_deadline=True)


@pytest.fixture
def cell(cell: Cell) -> Cell:
    """One in which nobody is dead because the test takes its time."""
    cell.agree(dead_after_s=60)
    return cell


def refused(cell: Cell, request_id: str = "req-x", **how: object) -> calls.Accepted:
    """A refusal, which must leave everything as it was."""
    before = cell.everything()
    answer = cell.accept(request_id, **how)  # pyright: ignore[reportArgumentType]
    assert answer.status not in ("OK", "EXISTS") and answer.retry_ms > 0, answer
    assert cell.everything() == before
    return answer


def worker(cell: Cell, *, pages: int = 10_000, slots: int = 4, pace: Pace | None = None, name: str = "w") -> str:
    """One that runs the whole model, and says how fast it is."""
    cell.worker(name, split="1-4", pages=pages, slots=slots)
    if pace is not None:
        cell.scripts.run(calls.heartbeat(name, pace))
    return name


def in_s(cell: Cell, seconds: float) -> int:
    """A deadline."""
    at: tuple[int, int] = cell.client.time()  # pyright: ignore[reportAssignmentType]
    return int(at[0] * 1000 + at[1] / 1000 + 1000 * seconds)


class TestTokens:
    LIMITS = Limits(tokens_per_minute=60)

    def test_a_minutes_worth_at_once_and_then_as_time_passes(self, cell: Cell) -> None:
        for i in range(5):  # 3 + 8 tokens each
            assert cell.accept(f"req-{i}", tenant="ada", limits=self.LIMITS).status == "OK"
        answer = refused(cell, tenant="ada", limits=self.LIMITS)
        assert answer.status == "TOKENS" and answer.detail == "5" and answer.retry_ms == pytest.approx(6000, abs=500)
        self.pass_s(cell, 7)
        assert cell.accept("req-9", tenant="ada", limits=self.LIMITS).status == "OK"

    def test_tenants_have_buckets_of_their_own(self, cell: Cell) -> None:
        for i in range(5):
            cell.accept(f"req-{i}", tenant="ada", limits=self.LIMITS)
        assert cell.accept("req-9", tenant="bob", limits=self.LIMITS).status == "OK"
        assert cell.accept("req-10", tenant="ada").status == "OK", "the limit is its key's, not its name's"

    def test_asking_again_for_what_was_accepted_costs_nothing(self, cell: Cell) -> None:
        for _ in range(20):
            assert cell.accept("req-1", tenant="ada", limits=self.LIMITS).status in ("OK", "EXISTS")

    def test_what_ends_before_anybody_has_begun_it_costs_nothing(self, cell: Cell) -> None:
        for i in range(20):
            assert cell.accept(f"req-{i}", tenant="ada", limits=self.LIMITS).status == "OK"
            cell.scripts.run(calls.finish(f"req-{i}", "cancelled"))

    @pytest.mark.parametrize("end", ["stop", "cancelled"])
    def test_what_has_begun_costs_its_prompt_and_what_it_has_generated(self, cell: Cell, end: str) -> None:
        name = worker(cell)
        for i in range(5):
            run = cell.begin(name, [1, 2], request_id=f"req-{i}", tenant="ada", limits=self.LIMITS)
            if end == "stop":
                cell.commit(run, 2, [], end="stop")
            else:
                cell.scripts.run(calls.finish(f"req-{i}", "cancelled"))
        assert self.bucket(cell, "ada")[0] == pytest.approx(60 - 5 * (3 + 2), abs=1)

    def test_what_is_generated_beyond_what_was_charged_is_charged_at_the_end(self, cell: Cell) -> None:
        run = cell.begin(worker(cell), [1, 2, 3], tenant="ada", limits=self.LIMITS, expected_tokens=1)
        cell.commit(run, 3, [4], end="stop")
        assert self.bucket(cell, "ada")[0] == pytest.approx(60 - (3 + 4), abs=1)

    def test_what_was_accepted_before_the_key_had_a_limit_gives_nothing_back(self, cell: Cell) -> None:
        run = cell.begin(worker(cell), request_id="before", tenant="ada", content=body(max_tokens=5000))
        wait_until(lambda: cell.now_ms() > int(cell.record("before")["accepted_ms"]), "a millisecond passes")
        cell.accept("req-1", tenant="ada", limits=self.LIMITS)
        cell.commit(run, 0, [1], end="stop")
        assert self.bucket(cell, "ada")[0] == pytest.approx(60 - 11, abs=1)

    @settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        per_minute=st.integers(10, 10_000),
        steps=st.lists(st.tuples(st.integers(1, 400), st.floats(0, 100)), min_size=1, max_size=12),
    )
    def test_over_any_time_it_admits_what_flows_in_and_no_less(
        self, cell: Cell, per_minute: int, steps: list[tuple[int, float]]
    ) -> None:
        """Decided by Redis' clock: what the bucket says of an admission, the times around the call for a refusal."""
        begin_cell(cell.client, cell.keys)
        level, since_ms = float(per_minute), cell.now_ms()

        def filled(now_ms: int) -> float:
            return min(per_minute, level + (now_ms - since_ms) * per_minute / 60_000)

        for i, (tokens, pause_s) in enumerate(steps):
            content, cost = body(list(range(1, tokens + 1)), max_tokens=1), tokens + 1
            before_ms = cell.now_ms()
            answer = cell.accept(f"req-{i}", tenant="t", limits=Limits(tokens_per_minute=per_minute), content=content)
            after_ms = cell.now_ms()
            if answer.status == "OK":
                left, at_ms = self.bucket(cell, "t")
                assert before_ms <= at_ms <= after_ms
                assert cost <= filled(at_ms)
                assert left == pytest.approx(filled(at_ms) - cost, abs=0.001), "it is kept with three decimals"
                level, since_ms = left, at_ms
            else:
                most, least = cost - filled(before_ms), cost - filled(after_ms)
                assert answer.status == "TOKENS" and most > 0
                assert (
                    math.ceil(least * 60_000 / per_minute) <= answer.retry_ms <= math.ceil(most * 60_000 / per_minute)
                )
            since_ms -= self.pass_s(cell, pause_s, tenant="t")

    def bucket(self, cell: Cell, tenant: str) -> tuple[float, int]:
        """Tokens left, and the millisecond of Redis' clock at which they were."""
        raw: dict[bytes, bytes] = cell.client.hgetall(cell.keys.bucket(tenant))  # pyright: ignore[reportAssignmentType]
        return float(raw[b"level"]), int(raw[b"at"])

    def pass_s(self, cell: Cell, seconds: float, tenant: str = "ada") -> int:
        """Milliseconds that have passed for the bucket, if there is one."""
        if not cell.client.exists(cell.keys.bucket(tenant)):
            return 0
        cell.client.hincrby(cell.keys.bucket(tenant), "at", -int(seconds * 1000))
        return int(seconds * 1000)


def test_several_prompts_are_checked_with_the_first_and_each_pays_for_itself(cell: Cell) -> None:
    worker(cell, pages=10)
    several = Limits(tokens_per_minute=60, others=3, each=True, others_tokens=33, others_rows=9, others_pages=6)
    assert refused(cell, tenant="ada", limits=replace(several, others_tokens=50)).status == "TOKENS"
    assert refused(cell, tenant="ada", limits=replace(several, concurrency=3)).status == "CONCURRENT"
    assert refused(cell, tenant="ada", limit=3, limits=several).status == "BUSY"
    never = refused(cell, tenant="ada", limits=replace(several, overcommit=1, others_pages=9))
    assert (never.status, never.detail) == ("PAGES", "0"), "though nobody has promised anything"
    for left in (3, 2, 1, 0):
        limits = replace(several, others=left, others_tokens=11 * left)
        assert cell.accept(f"req-{left}", tenant="ada", limits=limits).status == "OK"
    level = float(cell.client.hget(cell.keys.bucket("ada"), "level") or 0)  # pyright: ignore[reportArgumentType]
    assert level == pytest.approx(60 - 4 * 11, abs=1)


def test_a_tenants_requests_under_way_are_bounded(cell: Cell) -> None:
    limits = Limits(concurrency=2)
    for i in range(2):
        assert cell.accept(f"req-{i}", tenant="ada", limits=limits).status == "OK"
    assert refused(cell, tenant="ada", limits=limits).status == "CONCURRENT"
    assert cell.accept("req-9", tenant="bob", limits=limits).status == "OK"
    cell.scripts.run(calls.finish("req-0", "cancelled"))
    assert cell.accept("req-10", tenant="ada", limits=limits).status == "OK"


def test_what_was_accepted_is_never_refused(cell: Cell) -> None:
    assert cell.accept("req-1", limit=1, tenant="ada").status == "OK"
    strict = Limits(tokens_per_minute=1, concurrency=1, wait_s=0.001, overcommit=0.001, enforce_deadline=True)
    assert cell.accept("req-1", limit=1, tenant="ada", limits=strict, deadline_ms=1).status == "EXISTS"


def test_kv_pages_are_promised_only_so_many_times(cell: Cell) -> None:
    worker(cell, pages=10)
    for i in range(4):
        assert cell.accept(f"req-{i}", need=5, limits=Limits(overcommit=2)).status == "OK"
    assert refused(cell, need=1, limits=Limits(overcommit=2)) == calls.Accepted("PAGES", "20", retry_ms=1000)
    worker(cell, pages=10, name="another")
    assert cell.accept("req-9", need=5, limits=Limits(overcommit=2)).status == "OK"


class TestForecast:
    """A worker that needs 1 ms for a prompt row and 10 ms for a token of four requests at once."""

    PACE = Pace(row_s=0.001, steps={4: 0.040})

    def fill(self, cell: Cell, count: int, *, claimed: int = 0) -> None:
        """Requests of 100 + 100 tokens: 1.1 s each."""
        for i in range(count):
            content = body(list(range(1, 101)), max_tokens=100)
            assert cell.accept(f"req-{i}", content=content, limit=1000).status == "OK"
        assert len(cell.claim("w", claimed or 1)) == claimed if claimed else True

    def ask(self, cell: Cell, seconds: float, request_id: str = "req-x", **how: object) -> calls.Accepted:
        content = body([1, 2, 3, 4], max_tokens=10)
        return cell.accept(
            request_id,
            content=content,
            limit=1000,
            deadline_ms=in_s(cell, seconds),
            limits=PUNCTUAL,
            **how,  # pyright: ignore
        )

    def test_an_idle_worker_takes_what_it_can_do_in_time(self, cell: Cell) -> None:
        worker(cell, pace=self.PACE)
        assert self.ask(cell, 0.3).status == "LATE"
        assert self.ask(cell, 1.5).status == "OK"

    def test_alone_it_is_faster_than_in_the_company_of_late(self, cell: Cell) -> None:
        steps = {1: 0.010, 4: 0.100}
        worker(cell, pace=Pace(row_s=0.001, steps=steps))
        assert self.ask(cell, 0.8).status == "OK", "0.1 s, a reserve of 0.3 s and a quarter"
        assert self.ask(cell, 0.8, "req-y").status == "LATE", (
            "two at once are as slow as four, until they were measured"
        )
        cell.scripts.run(calls.finish("req-x", "cancelled"))
        cell.scripts.run(calls.heartbeat("w", Pace(row_s=0.001, steps=steps, recent_concurrency=4)))
        cell.a_second_passes()
        assert self.ask(cell, 0.8, "req-z").status == "LATE"

    def test_a_queue_counts_in_full(self, cell: Cell) -> None:
        worker(cell, pace=self.PACE)
        self.fill(cell, 20)  # 22 s of work
        late = self.ask(cell, 30)
        assert late.status == "LATE" and 20_000 < int(late.detail) < 25_000 and 0 < late.retry_ms < 30_000
        assert self.ask(cell, 60).status == "OK"

    def test_more_workers_halve_the_time(self, cell: Cell) -> None:
        worker(cell, pace=self.PACE)
        worker(cell, pace=self.PACE, name="another")
        self.fill(cell, 20)
        assert self.ask(cell, 30).status == "OK"

    def test_silent_workers_do_not_count(self, cell: Cell) -> None:
        worker(cell, pace=self.PACE)
        worker(cell, pace=self.PACE, name="another")
        cell.client.zadd(cell.keys.workers, {"another": in_s(cell, -100)})
        self.fill(cell, 20)
        assert self.ask(cell, 30).status == "LATE"

    def test_what_is_computed_counts_no_more(self, cell: Cell) -> None:
        worker(cell, pace=self.PACE, slots=4)
        self.fill(cell, 4)
        runs = cell.claim("w", 4)
        assert self.ask(cell, 5).status == "LATE"
        for run in runs:
            cell.commit(run, 0, list(range(95)))
        assert self.ask(cell, 5).status == "OK"

    def test_without_a_deadline_only_the_first_token_counts(self, cell: Cell) -> None:
        worker(cell, pace=self.PACE)
        self.fill(cell, 20)
        assert refused(cell, limits=Limits(wait_s=15)).status == "WAIT"
        assert cell.accept("req-y", limits=Limits(wait_s=30)).status == "OK"

    def test_before_anything_was_measured_a_few_are_let_in(self, cell: Cell) -> None:
        worker(cell)
        answers = [self.ask(cell, 30, f"req-{i}").status for i in range(12)]
        assert answers == ["OK"] * 8 + ["LATE"] * 4
        assert cell.accept("req-20").status == "OK", "without a deadline it may take its time"

    def test_several_prompts_are_forecast_as_the_last_of_them_will_be(self, cell: Cell) -> None:
        worker(cell, pace=self.PACE)
        several = Limits(wait_s=15, others=20, each=True, others_tokens=4000, others_rows=2000, others_pages=260)
        assert refused(cell, limits=several).status == "WAIT", "as behind 20 that wait"
        assert cell.accept("req-y", limits=replace(several, wait_s=30)).status == "OK"

    def test_another_tenant_waits_for_its_share_only(self, cell: Cell) -> None:
        worker(cell, pace=self.PACE)
        self.fill(cell, 200)
        assert self.ask(cell, 30).status == "LATE"
        assert self.ask(cell, 30, tenant="bob").status == "OK"

    def test_an_earlier_priority_waits_for_none_of_the_later_ones(self, cell: Cell) -> None:
        worker(cell, pace=self.PACE)
        self.fill(cell, 200)
        assert self.ask(cell, 30, priority=1).status == "LATE"
        assert self.ask(cell, 30, priority=-1).status == "OK"

    def test_who_would_miss_its_deadline_is_claimed_first(self, cell: Cell) -> None:
        worker(cell, pace=self.PACE)
        self.fill(cell, 20)
        assert self.ask(cell, 60).status == "OK"
        assert [run.request_id for run in cell.claim("w", 1)] == ["req-0"]
        cell.client.zadd(cell.keys.due("0123456789abcdef", "cpu"), {"req-x": in_s(cell, 0.5)})
        (run,) = cell.claim("w", 1)
        assert run.request_id == "req-x" and run.left_s == pytest.approx(60, abs=5)


def test_it_costs_the_same_whatever_waits(cell: Cell) -> None:
    """A queue of a thousand from fifty tenants, two workers: ACCEPT runs as many Redis commands as on an empty one."""
    everything = Limits(
        tokens_per_minute=10**9, concurrency=10**6, wait_s=10**6, overcommit=10**6, enforce_deadline=True
    )
    for name in ("v", "w"):
        worker(cell, pace=Pace(0.0001, {64: 0.001}), name=name)

    numbers = itertools.count()

    def registry_is_known() -> bool:
        """And stays so: otherwise it is read once a second."""
        assert cell.accept(f"req-x{next(numbers)}", limit=10**6, limits=everything).status == "OK"
        return bool(cell.client.persist(cell.keys.fleet(MODEL)))

    wait_until(registry_is_known, "what is known of the workers stays")
    costs: list[int] = []
    for start in range(0, 1000, 100):
        cell.client.zadd(
            cell.keys.workers, dict.fromkeys("vw", cell.now_ms())
        )  # however slow the machine is, they live
        cell.client.config_resetstat()
        for i in range(start, start + 100):
            answer = cell.accept(
                f"req-{i}", limit=10**6, tenant=f"t{i % 50}", limits=everything, deadline_ms=in_s(cell, 9e6)
            )
            assert answer.status == "OK"
        stats: dict[str, dict[str, int]] = cell.client.info("commandstats")  # pyright: ignore
        costs.append(sum(one["calls"] for one in stats.values()))
    assert costs[-1] <= costs[1], costs
    cell.client.delete(cell.keys.fleet(MODEL))
