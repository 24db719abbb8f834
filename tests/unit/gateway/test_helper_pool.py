"""Helper processes that die, hang, and run out of memory: what their caller gets, and the next one."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from blockrelay.errors import BadRequest, RequestTooLarge, ServiceUnavailable
from blockrelay_gateway.helpers.pool import Helpers
from blockrelay_gateway.http.body_budget import BodyBudget, BodyShare
from tests.support.gateway.helper_work import die, die_once, fill_memory, hang, pid, refuse
from tests.support.waiting import wait_until


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


async def test_signals_to_all_processes_end_the_gateway_not_its_helpers() -> None:
    """It may be draining, and what it reads for clients is not done."""
    helpers = Helpers(1)
    helper = await helpers.run("", pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(helper, number)
    assert await helpers.run("", pid) == helper


async def test_a_helper_is_another_process_that_stays(tmp_path: Path) -> None:
    helpers = Helpers(1)
    first, again = await helpers.run("", pid), await helpers.run("", pid)
    assert first == again != os.getpid()
    with pytest.raises(BadRequest) as raised:
        await helpers.run("", refuse)
    assert raised.value.param == "x"


async def test_a_call_whose_helper_dies_is_made_once_more(tmp_path: Path) -> None:
    helpers = Helpers(1)
    assert await helpers.run("", die_once, str(tmp_path / "mark")) == "done"
    with pytest.raises(ServiceUnavailable, match="died twice"):
        await helpers.run("", die, "")
    assert await helpers.run("", pid) != os.getpid(), "the next one starts"


async def test_an_idle_helper_that_was_killed_is_replaced() -> None:
    helpers = Helpers(1)
    first = await helpers.run("", pid)
    os.kill(first, signal.SIGKILL)
    assert await helpers.run("", pid) != first


async def started(helpers: Helpers) -> bool:
    """Whether a helper is there now and answers."""
    try:
        await helpers.run("", pid)
    except ServiceUnavailable:
        return False
    return True


async def test_a_helper_that_hangs_is_killed(tmp_path: Path) -> None:
    slow, mark = Helpers(1, within_s=4.0), tmp_path / "mark"
    while not mark.exists():  # on a busy machine four seconds do not suffice to start one, or to call it
        while not await started(slow):
            pass
        with pytest.raises(ServiceUnavailable, match="within 4 seconds"):
            await slow.run("", hang, str(mark))
    hung = int(mark.read_text())
    await asyncio.to_thread(wait_until, lambda: not alive(hung), "the helper that hangs is gone")
    assert await slow.run("", pid) != hung


async def test_a_call_without_memory_keeps_no_place_from_those_that_have_it() -> None:
    """The large one comes first, and fits only when the small ones behind it have been read."""
    helpers, budget, order = Helpers(1), BodyBudget(16 << 20), list[str]()

    async def read(name: str, arrived: int, parsed: int) -> None:
        share = BodyShare(budget, large=True)
        share.take(arrived << 20)
        await asyncio.sleep(0)  # all have arrived before the first has its turn
        await helpers.run("", pid, room=lambda: share.take_parsed(parsed << 20))
        order.append(name)
        share.give_back()

    await asyncio.gather(read("large", 1, 12), read("small", 2, 1), read("small", 2, 1))
    assert order == ["small", "small", "large"] and budget.used == 0


async def test_memory_that_does_not_suffice_is_no_bug() -> None:
    with pytest.raises(RequestTooLarge, match="not enough memory"):
        await Helpers(1).run("", fill_memory)


def test_helpers_end_with_the_loop() -> None:
    found = asyncio.run(Helpers(1).run("", pid))
    wait_until(lambda: not alive(found), "the helper is gone")
