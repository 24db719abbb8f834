"""The gateway's container keeps within its memory while clients send bodies and ask for answers that want more."""

import logging
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from blockrelay.auth.api_keys import Tenant, add_key
from tests.support.gateway.hostile_bodies import MIB, hostile_bodies, step_with_all_logits
from tests.support.models.wide_model import write_wide_model
from tests.support.project import ROOT
from tests.support.systems.compose_stack import ComposeStack, leftovers, mountable_copy

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

_log = logging.getLogger(__name__)

BODIES, STEPS, ATTACKERS = 200, 50, 4
#: The bundled model's vocabulary is 2,048: its answers are half a megabyte. Of these each has 12 MB in float32.
VOCAB, TOKENS = 50_000, 60
#: What a client may be told: served, accepted, or why not.
ALLOWED = {200, 202, 400, 413, 429, 503}
#: Prints a container's limit and its peak in bytes, and how many of its processes the kernel has killed for want of
#: memory, those that Docker does not look at too.
READ_GROUP = """
from pathlib import Path
old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
if old.is_dir():
    names = old / "memory.limit_in_bytes", old / "memory.max_usage_in_bytes", old / "memory.oom_control"
else:
    names = new / "memory.max", new / "memory.peak", new / "memory.events"
limit, peak, events = (name.read_text() if name.exists() else "0" for name in names)
print(int(limit), int(peak), dict(line.split() for line in events.splitlines())["oom_kill"])
"""


@dataclass(frozen=True)
class Up:
    """The running stack, and the keys of clients that attack and of one that does not; all empty where keys are off."""

    stack: ComposeStack
    attackers: list[str]
    other: str

    def post(self, key: str, path: str, **content: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.post(f"{self.stack.url}{path}", headers=headers, timeout=600, **content)

    def small(self) -> int:
        """The status of a small request of the other client."""
        return self.post(self.other, "/v1/completions", json={"prompt": [5], "max_tokens": 1}).status_code


@pytest.fixture(scope="module", params=["anybody", "keys"])
def up(request: pytest.FixtureRequest) -> Iterator[Up]:
    with tempfile.TemporaryDirectory(prefix="blockrelay-compose-") as name:
        folder = Path(name)
        model = mountable_copy(write_wide_model(folder / "made", VOCAB), folder)
        sizes = {"BLOCKRELAY_STAGES": "1", "BLOCKRELAY_WORKERS": "2"}
        if request.param == "keys":
            (folder / "keys").mkdir()
            keys = folder / "keys" / "keys.json"
            attackers = [add_key(keys, Tenant(name=f"mallory-{number}")) for number in range(ATTACKERS)]
            other = add_key(keys, Tenant(name="ada"))
            keys.chmod(0o644)
            keys.parent.chmod(0o755)
            more = ROOT / "deploy" / "compose" / "keys.yaml"
            stack = ComposeStack(model, more, KEYS_DIR=str(keys.parent), **sizes)
        else:
            attackers, other = [""] * ATTACKERS, ""
            stack = ComposeStack(model, **sizes)
        stack.down()
        try:
            stack.build()
            stack.up()
            yield Up(stack, attackers, other)
        finally:
            stack.down()
        assert not leftovers()


def test_a_gateway_of_512_mib_is_never_killed_and_serves_others_meanwhile(up: Up) -> None:
    (gateway,) = up.stack.containers("gateway")
    begun = up.stack.inspect(gateway)
    assert begun["HostConfig"]["Memory"] == 512 * MIB, "compose's default"
    bodies, step = hostile_bodies(), step_with_all_logits(TOKENS)

    def attack(number: int) -> int:
        path, body = bodies[number % len(bodies)]
        return up.post(up.attackers[number % ATTACKERS], path, content=body).status_code

    def ask(number: int) -> tuple[int, int]:
        answer = up.post(up.attackers[number % ATTACKERS], "/v1/infer", json=step)
        return answer.status_code, len(answer.content)

    assert up.small() == 200
    with ThreadPoolExecutor(60) as clients:
        steps = [clients.submit(ask, number) for number in range(STEPS)]
        attacks = [clients.submit(attack, number) for number in range(BODIES)]
        served = Counter[int]()
        while not all(one.done() for one in attacks + steps):
            served[up.small()] += 1
        refused, answers = Counter(one.result() for one in attacks), [one.result() for one in steps]

    counted = up.stack.python(gateway, READ_GROUP)
    assert counted.returncode == 0, counted.stderr
    limit, peak, killed = map(int, counted.stdout.split())
    told = Counter(status for status, _ in answers)
    _log.info("peak %d MiB; bodies %s, steps %s, others %s", peak // MIB, refused, told, served)
    assert set(served) == {200} and served[200] > 2, served
    assert set(refused) | set(told) <= ALLOWED and refused[413] and refused[400], (refused, told)
    whole = [size for status, size in answers if status == 200]
    assert len(whole) > 5 and min(whole) > TOKENS * VOCAB * 2 * 4 // 3, "they are whole"
    assert (limit, killed) == (512 * MIB, 0), f"peak {peak / MIB:.0f} MiB"
    ended = up.stack.inspect(gateway)
    assert ended["State"]["Running"] and not ended["State"]["OOMKilled"] and ended["RestartCount"] == 0
    assert ended["State"]["StartedAt"] == begun["State"]["StartedAt"]
