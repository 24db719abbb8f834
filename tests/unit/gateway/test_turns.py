"""Places at the helpers: bounded, and given to tenants in turn."""

import asyncio

from blockrelay_gateway.helpers.turns import Turns


class Crowd:
    """Tasks that want a place and keep it until they are let go."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self.order = turns, list[str]()
        self._leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def comes(self, *names: str) -> None:
        """One each: `a1` is the first of tenant `a`; `-1` the first of the tenant without a name."""
        for name in names:
            self._leave[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._stay(name))
            await asyncio.sleep(0)

    async def goes(self, name: str) -> None:
        self._leave[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)

    async def _stay(self, name: str) -> None:
        async with self._turns.place(name[0].strip("-")):
            self.order.append(name)
            await self._leave[name].wait()


async def test_who_waits_gets_a_place_tenant_by_tenant() -> None:
    crowd = Crowd(Turns(1))
    await crowd.comes("a1", "a2", "a3", "b1", "c1")
    for name in ("a1", "a2", "b1", "c1"):
        await crowd.goes(name)
    assert crowd.order == ["a1", "a2", "b1", "c1", "a3"]
    await crowd.goes("a3")


async def test_a_tenant_has_half_of_the_places_and_without_keys_all_are_there_for_all() -> None:
    crowd = Crowd(Turns(2))
    await crowd.comes("a1", "a2", "b1")
    assert crowd.order == ["a1", "b1"]
    for name in ("b1", "a1", "a2"):
        await crowd.goes(name)
    await crowd.comes("-1", "-2", "-3")
    assert crowd.order[3:] == ["-1", "-2"]
    for name in ("-1", "-2", "-3"):
        await crowd.goes(name)


async def test_one_that_gives_up_leaves_its_place_to_the_next() -> None:
    crowd = Crowd(Turns(1))
    await crowd.comes("a1", "a2", "b1")
    crowd.tasks["a2"].cancel()
    crowd.tasks["a1"].cancel()  # while it has its place
    await asyncio.wait(crowd.tasks.values(), timeout=0.1)
    assert crowd.order == ["a1", "b1"]
    await crowd.goes("b1")
    await crowd.comes("c1")
    assert crowd.order[-1] == "c1"
    await crowd.goes("c1")
