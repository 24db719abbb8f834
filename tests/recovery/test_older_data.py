"""A new release starts on the data folder of an older one, which ended with requests under way."""

import gzip
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
from tests.support.redis.redis_server import RedisServer
from tests.support.systems.system import Job, golden_tokens
from tests.support.systems.up_process import running_up
from tests.support.waiting import wait_until

MODEL = Path(blockrelay.__file__).parent / "models/storyteller"
KEYS = Keys("c0")
#: Append-only files of releases that were ended with `kill -9`, all processes at once: `up` on the bundled model, some
#: requests in the middle of their answers and some that nobody had begun.
LEFT = sorted((Path(__file__).parent / "data").glob("*.aof.gz"))


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


@pytest.mark.parametrize("left", LEFT, ids=lambda left: left.name.removesuffix(".aof.gz"))
def test_what_an_older_release_left_under_way_is_finished(left: Path, tmp_path: Path) -> None:
    """With the tokens of an undisturbed run."""
    control = tmp_path / "data/control"
    control.mkdir(parents=True)
    (control / "appendonly.aof").write_bytes(gzip.decompress(left.read_bytes()))
    bodies = unfinished(control)
    folder, expected = open_block_folder(MODEL), {}
    for name, body in bodies.items():
        params = SamplingParams.from_dict(body.params)
        job = Job(request=name, prompt=tuple(body.prompt.tolist()), params=params)
        expected |= golden_tokens(folder, [job], seed=params.seed)
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
