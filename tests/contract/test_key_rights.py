"""Rights to Redis keys: the table of families matches the code, and a caller without a right changes nothing."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from blockrelay.errors import RedisRefused
from blockrelay.protocol.keys import FAMILIES, SCRIPTS_OF, Keys, declared
from blockrelay.protocol.messages import Commit
from blockrelay.protocol.number import PROTOCOL
from blockrelay.protocol.transitions import calls, source
from blockrelay.redis.client import Scripts
from blockrelay.redis.users import families_of, files, rules
from tests.support.cell import MODEL, Cell
from tests.support.project import ROOT
from tests.support.redis.rights import user

CONTROL = {family.name for family in FAMILIES if family.server == "control"}
CALLS = {"publish_plan": "PLAN", "publish_slowdowns": "PLAN", "heartbeat": "BEAT"}  # called otherwise than its script


def functions(lua: str) -> dict[str, str]:
    """Name -> text of every function of a Lua file; what is outside of them under ''."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in re.sub(r"--.*", "", lua).splitlines():
        if begins := re.match(r"local function (\w+)", line):
            name = begins[1]
        found.setdefault(name, []).append(line)
        if line == "end" or (begins and line.endswith(" end")):
            name = ""
    return {name: "\n".join(lines) for name, lines in found.items()}


def families_in(script: str) -> set[str]:
    """The families whose names stand in the script and in the functions that it can reach."""
    library: dict[str, str] = {}
    waiting = [re.sub(r"--.*", "", source.script_text(script))]
    for part in source.source(script).parts:
        library |= functions(source.part_text(part))
        waiting.append(library.pop(""))  # what runs always
    seen, found = set[str](), set[str]()
    while waiting:
        text = waiting.pop()
        found |= set(re.findall(r"\bP \.\. '([\w-]+)", text))
        reached = {name for name in re.findall(r"\b(\w+)\(", text) if name in library} - seen
        seen |= reached
        waiting += [library[name] for name in reached]
    return found


@pytest.mark.parametrize("script", source.NAMES)
def test_a_script_declares_what_it_touches(script: str) -> None:
    assert families_in(script) == set(declared(script.upper()))


def test_no_script_makes_the_name_of_a_family_from_data() -> None:
    for file in Path(source.__file__).parent.rglob("*.lua"):
        assert re.findall(r"\bP \.\. (?!')", file.read_text()) == [], file.name


@pytest.mark.parametrize("role", SCRIPTS_OF)
def test_a_service_calls_the_scripts_that_the_table_says(role: str) -> None:
    code = "".join(f.read_text() for f in (ROOT / "services" / role).rglob("*.py"))
    called = re.findall(r"\b(?:calls|transitions)\.(\w+)\b|\.transitions\.calls import (\w+)$", code, re.M)
    names = {CALLS.get(name, name.upper()) for pair in called for name in pair if name in (*source.NAMES, *CALLS)}
    assert names == set(SCRIPTS_OF[role])


@pytest.mark.parametrize("role", SCRIPTS_OF)
def test_a_service_uses_the_keys_that_the_table_says(role: str) -> None:
    """Names that its code takes from `Keys`, and what shared code uses for it."""
    code = "".join(f.read_text() for f in (ROOT / "services" / role).rglob("*.py"))
    named = {name.replace("_", "-") for name in re.findall(r"\b_?keys\.(\w+)", code)}
    named &= {family.name for family in FAMILIES}
    written_down = {family.name for family in FAMILIES if role in family.users}
    by_shared_code = {"workers", "worker", "inbox", "worker-requests", "plan", "settings", "protocol", "totals"}
    by_shared_code |= {"lost-devices", "device-retry"}
    assert named <= written_down, "the code uses more than the table says"
    assert written_down <= named | by_shared_code, "the table says more than the code uses"


@pytest.mark.parametrize("name", files())
def test_the_users_for_others_are_those_of_the_table(name: str) -> None:
    shipped = (ROOT / "deploy" / "redis" / f"{name}.acl").read_text()
    assert shipped.splitlines() == files()[name], f"python -m blockrelay.redis.users {name} > deploy/redis/{name}.acl"


def test_services_may_list_names_and_nobody_may_flush_or_configure(cell: Cell) -> None:
    """What deploy/redis/README.md says of all users."""
    lists = {"gateway": True, "scheduler": True, "worker": True}
    lists |= dict.fromkeys(("keda", "exporter", "reloader", "probe"), False)
    lines = [line.split() for line in rules("control") if line.startswith("user ") and " off " not in line]
    assert {words[1] for words in lines} == set(lists)
    for _, name, *words in lines:
        commands = " ".join(word for word in words if word[0] in "+-")
        client = user(cell.client, name, (), commands=commands)
        try:
            for command, may in (("SCAN", lists[name]), ("KEYS", False), ("FLUSHDB", False), ("CONFIG GET", False)):
                ask = (*command.split(), *{"SCAN": ("0",), "KEYS": ("*",), "CONFIG GET": ("*",)}.get(command, ()))
                try:
                    client.execute_command(*ask)
                    assert may, f"{name} may {command}"
                except RedisRefused:
                    assert not may, f"{name} may not {command}"
        finally:
            client.close()


# --- every script with each right taken away ---


def _prepared(cell: Cell) -> dict[str, Callable[[Scripts], object]]:
    """A cell in which each of these calls writes as much as it can."""
    cell.worker("a", split="1-4")
    far, near = cell.now_ms() + 10**6, cell.now_ms() - 1
    for name in ("running", "ended", "failed", "on-dead", "old"):
        cell.accept(name, tenant="t", limits=calls.Limits(tokens_per_minute=1000, concurrency=100))
    runs = {run.request_id: run for run in cell.claim("a")}
    cell.accept("queued", tenant="t", limits=calls.Limits(tokens_per_minute=1000), deadline_ms=far)
    cell.accept("expired", tenant="t", limits=calls.Limits(tokens_per_minute=1000), deadline_ms=near)
    running, ended, failed = (runs[name] for name in ("running", "ended", "failed"))
    cell.commit(runs["old"], 0, [], end="stop")
    cell.client.hset(cell.keys.request("old"), "progress_ms", 1)
    commit = [
        Commit(request_id=running.request_id, run_id=running.run_id, position=0, tokens=(7,)),
        Commit(request_id=ended.request_id, run_id=ended.run_id, position=0, tokens=(7,), end="stop"),
    ]
    cell.worker("leaving", split="1-4", numerics="gone")
    cell.accept("waiting")
    for run in (r for r in cell.claim("leaving", 10) if r.request_id == "waiting"):
        cell.commit(run, 0, [7])
    cell.scripts.run(calls.dead("leaving", silent_s=0, reason="drain"))
    broken = {"error": "not finite", "code": "row_not_finite"}
    return {
        "accept": lambda scripts: Cell(cell.client, cell.keys, scripts).accept(
            "new", tenant="t", deadline_ms=far, limits=calls.Limits(tokens_per_minute=1000, concurrency=100)
        ),
        "claim": lambda scripts: scripts.run(calls.claim("a", 4, free_pages=100)),
        "commit": lambda scripts: scripts.run(calls.commit(commit)),
        "rerun": lambda scripts: scripts.run(calls.rerun(running.request_id, running.run_id, "stalled")),
        "finish": lambda scripts: scripts.run(
            calls.finish(failed.request_id, "error", meta=broken, run_id=failed.run_id)
        ),
        "dead": lambda scripts: scripts.run(calls.dead("a", silent_s=0, reason="death")),
        "forget": lambda scripts: scripts.run(calls.forget(8)),
        "move": lambda scripts: scripts.run(
            calls.move(calls.Binding("k", 2), retention_s=9, request_id="req-none", sessions=["none"])
        ),
        "beat": lambda scripts: scripts.run(calls.heartbeat("a", goes_on=True)),
        "migrate": lambda scripts: scripts.run(calls.migrate(MODEL, patience_s=0)),
        "upgrade": lambda scripts: scripts.run(calls.upgrade(PROTOCOL, PROTOCOL + 1)),
        "plan": lambda scripts: scripts.run(
            calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="cpu", plan="{}")
        ),
    }


@pytest.fixture
def taken(client: redis.Redis) -> Iterator[Callable[[set[str]], redis.Redis]]:
    """`taken(families)`: a client that may touch these only."""
    clients: list[redis.Redis] = []

    def make(families: set[str]) -> redis.Redis:
        clients.append(user(client, "lacking", families))
        return clients[-1]

    yield make
    for one in clients:
        one.close()


@pytest.mark.parametrize("script", source.NAMES)
def test_without_one_right_a_script_writes_nothing_and_with_all_everything(
    cell: Cell, keys: Keys, taken: Callable[[set[str]], redis.Redis], script: str
) -> None:
    call = _prepared(cell)[script]
    before = cell.everything()
    for family in declared(script.upper()):
        try:
            call(Scripts(taken(CONTROL - {family}), keys))
        except RedisRefused:
            assert cell.everything() == before, family
        else:
            pytest.fail(f"{script} ran without the right to {family}")
    call(cell.scripts)
    assert cell.everything() != before


@pytest.mark.parametrize("role", ["worker", "scheduler"])
def test_a_request_that_ends_while_it_is_queued_is_ended_by_any_role(
    cell: Cell, keys: Keys, taken: Callable[[set[str]], redis.Redis], role: str
) -> None:
    """With the rights that deploy/redis gives the role; it gives the tenant its share and its tokens back."""
    scripts = Scripts(taken({family.name for family in families_of(role, "control")}), keys)
    cell.worker("a", split="1-4")
    cell.accept(tenant="t", limits=calls.Limits(tokens_per_minute=1000), deadline_ms=cell.now_ms() - 1)
    if role == "worker":
        assert scripts.run(calls.claim("a", 4, free_pages=100)) == []
    else:
        assert scripts.run(calls.finish("req-1", "expired")) == "FINISHED"
    assert cell.record()["state"] == "done" and cell.outstanding() == {} and cell.queued() == []
    assert float(cell.client.hget(cell.keys.bucket("t"), "level") or 0) == 1000  # pyright: ignore[reportArgumentType]
