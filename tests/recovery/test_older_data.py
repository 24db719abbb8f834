"""A new release starts on the data folder of an older one, which ended with requests under way."""

from pathlib import Path
from typing import cast

import httpx
import pytest

import blockrelay
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.number import PROTOCOL
from blockrelay.protocol.sampling_params import SamplingParams
from tests.support.older_data import CELL, LEFT, name_of, restore
from tests.support.redis.redis_server import RedisServer
from tests.support.systems.system import Job, golden_tokens
from tests.support.systems.up_process import running_up
from tests.support.waiting import wait_until

MODEL = Path(blockrelay.__file__).parent / "models/storyteller"
KEYS = Keys(CELL)


def unfinished(control: Path) -> dict[str, RequestBody]:
    """What the folder of a control Redis has under way."""
    server = RedisServer(control).start()
    try:
        with server.client() as client:
            names = [name.decode() for name in cast("list[bytes]", client.zrange(KEYS.running, 0, -1))]
            states = {client.hget(KEYS.request(name), "state") for name in names}
            assert states == {b"running", b"queued"}
            return {name: RequestBody.decode(cast(bytes, client.hget(KEYS.request(name), "body"))) for name in names}
    finally:
        server.stop()


@pytest.mark.parametrize("death", ["", "scheduler.before_upgrade:kill@3", "scheduler.after_upgrade:kill@3"])
@pytest.mark.parametrize("left", LEFT, ids=name_of)
def test_what_an_older_release_left_under_way_is_finished(
    left: Path, death: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tokens of an undisturbed run, also where the scheduler dies while it upgrades the cell."""
    control = tmp_path / "data/control"
    restore(left, control)
    bodies = unfinished(control)
    folder, expected = open_block_folder(MODEL), {}
    for name, body in bodies.items():
        params = SamplingParams.from_dict(body.params)
        job = Job(request=name, prompt=tuple(body.prompt.tolist()), params=params)
        expected |= golden_tokens(folder, [job], seed=params.seed)
    monkeypatch.setenv("BLOCKRELAY_FAILPOINT", death)
    with running_up(MODEL, data=tmp_path / "data") as up:

        def answers() -> dict[str, httpx.Response]:
            return {name: httpx.get(f"{up.url}/v1/requests/{name}") for name in bodies}

        wait_until(lambda: all(a.json()["status"] == "completed" for a in answers().values()), "all are finished")
        assert {name: answer.json()["token_ids"] for name, answer in answers().items()} == expected
    server = RedisServer(control).start()
    with server.client() as client:
        assert client.get(KEYS.protocol) == b"%d" % PROTOCOL
    server.stop()


def test_there_is_something_left() -> None:
    assert LEFT
