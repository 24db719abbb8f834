"""The history of a model's plans: of two appends at the same time one is refused, and the newest entry counts."""

from collections.abc import Callable
from typing import Any

import pytest
import redis

from blockrelay.errors import RedisRefused, RedisTrouble
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.plan import Plan
from blockrelay.protocol.planned_split import PlannedSplit, equal_parts
from blockrelay.protocol.transitions.calls import Call
from blockrelay.redis import plan_history
from blockrelay.redis.client import Scripts
from blockrelay.redis.plan_history import PlanEntry, append, read_history
from blockrelay.redis.registry import read_plan
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.plan_publisher import PlanPublisher
from blockrelay_scheduler.replanning import measured_profile
from blockrelay_scheduler.replanning.measured_profile import MeasuredProfile
from tests.support.cell import MODEL
from tests.support.redis.redis_server import RedisServer

ONE, TWO = equal_parts(4, 1), equal_parts(4, 2)


@pytest.fixture
def link(client: redis.Redis, keys: Keys, scripts: Scripts) -> SchedulerLinks:
    return SchedulerLinks(client, client, keys, scripts)


@pytest.fixture
def scheduler(link: SchedulerLinks) -> Callable[..., PlanPublisher]:
    """One that has just begun, with these settings."""

    def make(planned: PlannedSplit = ONE, name: str = "s") -> PlanPublisher:
        return PlanPublisher(link, MODEL, planned, vacancy_s=60, name=name)

    return make


def apply(link: SchedulerLinks, planned: PlannedSplit, who: str = "ada@host") -> PlanEntry:
    behind = read_history(link.client, link.keys, MODEL)[0].id
    added = append(link.client, link.keys, MODEL, planned, origin="apply", who=who, behind=behind)
    assert added is not None
    return added


def in_force(link: SchedulerLinks) -> Plan:
    plan = read_plan(link.client, link.keys, MODEL)
    assert plan is not None
    return plan


def sources(link: SchedulerLinks) -> list[str]:
    return [entry.source for entry in read_history(link.client, link.keys, MODEL)]


def test_who_did_not_see_the_newest_entry_appends_nothing(link: SchedulerLinks) -> None:
    given: dict[str, Any] = {"origin": "apply", "who": "ada@host"}
    first = append(link.client, link.keys, MODEL, ONE, **given, behind="")
    assert first is not None
    assert append(link.client, link.keys, MODEL, TWO, **given, behind="") is None
    second = append(link.client, link.keys, MODEL, TWO, **given, behind=first.id)
    assert read_history(link.client, link.keys, MODEL) == [second, first]
    assert first.source == "applied by ada@host" and first.at_ms > 1e12


def test_who_comes_between_the_look_and_the_entry_is_noticed(
    link: SchedulerLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_json = PlannedSplit.to_json

    def and_somebody_else(self: PlannedSplit) -> str:
        monkeypatch.setattr(PlannedSplit, "to_json", to_json)
        append(link.client, link.keys, MODEL, TWO, origin="apply", who="bob@host", behind="")
        return to_json(self)

    monkeypatch.setattr(PlannedSplit, "to_json", and_somebody_else)
    assert append(link.client, link.keys, MODEL, ONE, origin="apply", who="ada@host", behind="") is None
    assert sources(link) == ["applied by bob@host"]


def test_the_history_is_bounded(link: SchedulerLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_history, "KEPT", 3)
    behind = ""
    for number in range(5):
        added = append(link.client, link.keys, MODEL, ONE, origin="apply", who=str(number), behind=behind)
        assert added is not None
        behind = added.id
    assert sources(link) == [f"applied by {number}" for number in (4, 3, 2)]


def test_schedulers_of_equal_settings_make_one_entry(
    link: SchedulerLinks, scheduler: Callable[..., PlanPublisher]
) -> None:
    for name in ("a", "b", "a"):
        scheduler(TWO, name).publish([], trusted=True)
    assert sources(link) == ["settings of a"] and in_force(link).split == "1-2,3-4"
    assert in_force(link).epoch == 1 and in_force(link).source == "settings of a"


def test_what_was_applied_outlives_a_scheduler_but_not_other_settings(
    link: SchedulerLinks, scheduler: Callable[..., PlanPublisher]
) -> None:
    first = scheduler(ONE)
    first.publish([], trusted=True)
    apply(link, TWO)
    assert first.publish([], trusted=True).split == "1-2,3-4"
    assert scheduler(ONE).publish([], trusted=True).source == "applied by ada@host"
    three = equal_parts(4, 3)
    assert scheduler(three, "new").publish([], trusted=True).split == three.text
    assert first.publish([], trusted=True).split == three.text, "all follow the newest"
    assert sources(link) == ["settings of new", "applied by ada@host", "settings of s"]


def test_a_lost_history_is_told_again(link: SchedulerLinks, scheduler: Callable[..., PlanPublisher]) -> None:
    one = scheduler(ONE)
    one.publish([], trusted=True)
    apply(link, TWO)
    one.publish([], trusted=True)
    link.client.delete(link.keys.plan_history(MODEL), link.keys.plan(MODEL))
    assert one.publish([], trusted=True).split == "1-2,3-4"
    assert sources(link) == ["applied by ada@host"]


def test_a_scheduler_that_has_not_seen_the_newest_entry_publishes_nothing_over_it(
    link: SchedulerLinks, scheduler: Callable[..., PlanPublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has looked; before it publishes another plan is applied, and another scheduler publishes that."""
    run, late = link.scripts.run, scheduler(ONE, "late")

    def behind_the_others(call: Call[Any]) -> Any:
        monkeypatch.undo()
        apply(link, TWO)
        scheduler(ONE, "early").publish([], trusted=True)
        return run(call)

    monkeypatch.setattr(link.scripts, "run", behind_the_others)
    assert late.publish([], trusted=True).split == "1-2,3-4"
    assert in_force(link).epoch == 1 and in_force(link).source == "applied by ada@host"


@pytest.mark.parametrize(
    "fields", [{"plan": "{}", "origin": "apply"}, {"plan": ONE.to_json(), "origin": "magic"}, {"origin": "apply"}]
)
def test_an_entry_that_is_none_is_said_and_the_plan_stays(
    link: SchedulerLinks, scheduler: Callable[..., PlanPublisher], fields: dict[str, str]
) -> None:
    one = scheduler(ONE)
    one.publish([], trusted=True)
    entry = link.client.xadd(link.keys.plan_history(MODEL), {"who": "me", **fields})
    with pytest.raises(RedisRefused, match=r"of the plan history.*remove it with XDEL"):
        one.publish([], trusted=True)
    assert in_force(link).split == "1-4"
    link.client.xdel(link.keys.plan_history(MODEL), entry)  # pyright: ignore[reportArgumentType]
    assert one.publish([], trusted=True).split == "1-4"


def test_a_user_whom_the_system_does_not_know_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert plan_history.this_person().partition("@")[0].isdigit()


def test_a_server_that_is_gone_is_trouble_for_whoever_appends(own_redis: RedisServer) -> None:
    """Also in the reads behind WATCH, which a pipeline sends at once: a scheduler goes on after RedisTrouble alone."""
    keys = Keys("t")
    with own_redis.client() as client:
        first = append(client, keys, MODEL, ONE, origin="apply", who="ada@host", behind="")
        assert first is not None
        own_redis.kill()
        with pytest.raises(RedisTrouble):
            append(client, keys, MODEL, TWO, origin="apply", who="ada@host", behind=first.id)
        with pytest.raises(RedisTrouble):
            measured_profile.replace(client, keys, MODEL, MeasuredProfile(), instead_of=None)
        own_redis.start()


@pytest.mark.parametrize("damage", ["rub{{", "[]", "{}", '{"reasons": [], "blocks": {"x": 1}}', "\xff"])
def test_a_damaged_plan_is_told_with_its_key_and_published_again_once_it_is_removed(
    client: redis.Redis, keys: Keys, scheduler: Callable[..., PlanPublisher], damage: str
) -> None:
    publisher = scheduler(TWO)
    plan = publisher.publish([], trusted=True)
    client.hset(keys.plan(MODEL), "plan", damage)
    for ask in (lambda: read_plan(client, keys, MODEL), lambda: publisher.publish([], trusted=True)):
        with pytest.raises(RedisRefused, match=f"{keys.plan(MODEL)} is damaged .*remove the key with DEL"):
            ask()
    client.delete(keys.plan(MODEL))
    again = publisher.publish([], trusted=True)
    assert again.split == plan.split
