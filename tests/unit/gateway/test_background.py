"""All background work of the gateway ends when it is cancelled, also at the moment at which its wait ends.

If a cancellation were swallowed there, the process would hang until it is killed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from blockrelay.auth.api_keys import ANYBODY
from blockrelay.block_folder.folder import BlockFolder
from blockrelay.settings import GatewaySettings
from blockrelay_gateway import app
from blockrelay_gateway.admission import cell_watch, tensor_results
from blockrelay_gateway.api.state import Gateway
from blockrelay_gateway.build import build
from blockrelay_gateway.cells import cells
from blockrelay_gateway.streaming.active_requests import lost_request_repair
from blockrelay_gateway.streaming.status_events import Listener
from tests.support.gateway.links import followed

#: Rounds of the event loop between the event and the end: more than any of the works needs from one wait to the next.
ROUNDS = range(40)


@pytest.fixture
async def idle(
    settings: GatewaySettings, folder: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Gateway]:
    """A gateway whose background work the test starts."""
    monkeypatch.setattr(cell_watch, "MEMORY_POLL_S", 0)
    monkeypatch.setattr(tensor_results, "PAYLOAD_POLL_S", 0)
    monkeypatch.setattr(app, "READY_POLL_S", 0)
    monkeypatch.setattr(lost_request_repair, "REPAIR_EVERY_S", 60)
    monkeypatch.setattr(cells, "CELL_FILE_POLL_S", 0)
    gateway = build(settings.model_copy(update={"grace_s": 0}), folder, tenants=[ANYBODY.name])
    yield gateway
    await gateway.cells.home.links.client.aclose()
    await gateway.cells.home.links.payload.aclose()


def tell_tailer(gateway: Gateway) -> None:
    gateway.cells.home.tailer.subscribe("req-1", lambda _: None)


def tell_repair(gateway: Gateway) -> None:
    gateway.cells.home.tailer.returned.set()


def tell_status_events(gateway: Gateway) -> None:
    source = gateway.cells.home.status_events
    source.add(Listener([source], ANYBODY))


def tell_nothing(gateway: Gateway) -> None:
    """It does not wait for anything but Redis and, here for no time at all, its timer."""


#: Work -> what makes the future complete that it waits for.
EVENTS: dict[str, Callable[[Gateway], None]] = {
    "tailer": tell_tailer,
    "repair": tell_repair,
    "admission": tell_nothing,
    "results": tell_nothing,
    "readiness": tell_nothing,
    "status events": tell_status_events,
    "cells": tell_nothing,
}


def works(gateway: Gateway) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
    """What runs as long as the gateway does, and what only until it is ready."""
    readiness = partial(app._say_when_ready, gateway)  # pyright: ignore[reportPrivateUsage]
    return {**gateway.cells.home.background.works, "readiness": readiness, "cells": gateway.cells.watch}


async def ends(work: Callable[[], Coroutine[Any, Any, None]], event: Callable[[], None], rounds: int) -> bool:
    """Whether `work`, once it waits, ends when it is cancelled `rounds` rounds of the event loop after `event`."""
    task = asyncio.create_task(work())
    for _ in range(20):
        await asyncio.sleep(0)
    event()
    for _ in range(rounds):
        await asyncio.sleep(0)
    return await _ends_when_cancelled(task)


async def _ends_when_cancelled(task: asyncio.Task[None]) -> bool:
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=2)
    while not task.done():  # leave nothing running: its children too, which a second cancellation of it does not reach
        for other in asyncio.all_tasks() - {asyncio.current_task()}:
            other.cancel()
        await asyncio.wait({task}, timeout=0.1)
    return bool(done)


def test_the_table_has_all_that_the_gateway_runs(idle: Gateway) -> None:
    assert set(EVENTS) == set(works(idle))


@pytest.mark.parametrize("name", EVENTS)
async def test_background_work_ends_at_any_moment_after_an_event(idle: Gateway, name: str) -> None:
    event = partial(EVENTS[name], idle)
    deaf = [rounds for rounds in ROUNDS if not await ends(works(idle)[name], event, rounds)]
    assert deaf == []


async def test_the_end_of_a_grace_period_ends_at_any_moment(idle: Gateway) -> None:
    deaf: list[int] = []
    of_cell = idle.cells.home.registry
    for rounds in ROUNDS:
        left = followed()
        of_cell.start(left)
        of_cell.attach(left)
        of_cell.detach(left)
        named: list[asyncio.Task[Any]] = []
        while not named:
            await asyncio.sleep(0)
            named = [task for task in asyncio.all_tasks() if task.get_name() == "grace-req-1"]
        for _ in range(rounds):
            await asyncio.sleep(0)
        if not named[0].done() and not await _ends_when_cancelled(named[0]):
            deaf.append(rounds)
        of_cell.drop(left)
    assert deaf == []
