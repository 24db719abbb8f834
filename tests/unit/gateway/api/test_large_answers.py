"""Answers of a hundred megabytes: streams of others go on while they are made, and they arrive whole."""

import asyncio
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from websockets.sync.client import connect

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.protocol.tensors import ResultReader, decode_tensor, encode_result
from blockrelay.settings import GatewaySettings
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.api.infer.responses import TensorAnswer
from tests.support.gateway.played import PlayedWorker, RunningGateway
from tests.support.gateway.sse_client import read_events
from tests.support.models.wide_model import write_wide_model
from tests.support.redis.redis_server import RedisServer

VOCAB, TOKENS = 100_000, 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    """The model folder of the other tests, but with the vocabulary of a large model."""
    return open_block_folder(write_wide_model(tmp_path_factory.mktemp("wide"), VOCAB), blocks=())


@pytest.fixture(scope="module")
def tokenizer(folder: BlockFolder) -> Tokenizer:
    assert folder.tokenizer_path is not None
    return Tokenizer.from_file(folder.tokenizer_path)


@pytest.fixture
def payload() -> Iterator[RedisServer]:
    """A payload Redis that writes nothing to a disk, as in a real cell."""
    with tempfile.TemporaryDirectory(prefix="br-test-") as place:
        server = RedisServer(Path(place), durable=False).start()
        yield server
        server.stop()


@pytest.fixture
def settings(folder: BlockFolder, redis_server: RedisServer, payload: RedisServer) -> GatewaySettings:
    return GatewaySettings(model=folder.root, redis_url=redis_server.url, payload_redis_url=payload.url, cell="t")


@pytest.fixture(scope="module")
def logits() -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal((TOKENS, VOCAB), np.float32)


BODY = {"input_tensors": {"input_ids": {"_tensor_": True, "data": list(range(3, 3 + TOKENS))}}, "logits": "all"}


def over_http(gateway: RunningGateway) -> bytes:
    return httpx.post(f"{gateway.url}/v1/infer", json=BODY, timeout=60).content


def over_a_socket(gateway: RunningGateway) -> bytes:
    with connect(gateway.url.replace("http", "ws") + "/v1/infer/ws", max_size=None) as socket:
        socket.send(json.dumps({"id": 7, **BODY}))
        answer = socket.recv(timeout=60)
    assert isinstance(answer, str) and answer.startswith('{"id":7,')
    return answer.encode()


@pytest.mark.parametrize("ask", [over_http, pytest.param(over_a_socket, marks=pytest.mark.thorough)])
def test_a_stream_goes_on_while_a_large_answer_is_made(
    gateway: RunningGateway,
    worker: PlayedWorker,
    payload: RedisServer,
    logits: NDArray[np.float32],
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[RunningGateway], bytes],
) -> None:
    """The first piece of the result waits until the stream has gone on: on the event loop it would wait for ever."""
    begun, heard = threading.Event(), threading.Event()

    def slowly(reader: ResultReader, piece: bytes) -> None:
        begun.set()
        assert heard.wait(20), "no event came meanwhile"
        push(reader, piece)

    push = ResultReader.push
    monkeypatch.setattr(ResultReader, "push", slowly)
    with (
        ThreadPoolExecutor() as threads,
        gateway.http.stream("POST", "/v1/completions", json={"prompt": [5], "stream": True}) as response,
    ):
        (stream,) = worker.claim()
        events = read_events(response)
        asked = threads.submit(ask, gateway)
        (claimed,) = worker.claim()
        store = payload.client()
        store.set(worker.keys.result(claimed.request_id), encode_result(logits))
        store.close()
        worker.say(claimed, [], end="tensor", meta={"execution_times": {}, "route": list(worker.names)})
        assert begun.wait(20)
        worker.say(stream, [9])
        next(events)
        heard.set()
        answer = asked.result()
    assert len(answer) > 100_000_000
    found = decode_tensor(json.loads(answer)["outputs"]["logits"], param="logits", max_elements=TOKENS * VOCAB)
    assert np.array_equal(found[0], logits.astype(np.float16))


async def test_between_two_pieces_everybody_has_a_turn() -> None:
    answer = TensorAnswer({"outputs": {"logits": {"data_b64": ""}}}, {"logits": np.ones((1, 10, VOCAB), np.float16)})
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(others())
    sizes = [len(piece) async for piece in answer.pieces()]
    beside.cancel()
    assert sum(sizes) == answer.size and turns >= len(sizes) - 4


def test_an_answer_may_say_anything(tmp_path: Path) -> None:
    """The place of the logits is found, whatever the rest of the answer says."""
    said = '"data_b64":"" \\"data_b64\\":\\"\\"'
    body = {"session_id": said, "outputs": {"logits": {"data_b64": ""}}}

    async def whole() -> bytes:
        return b"".join(
            [piece async for piece in TensorAnswer(body, {"logits": np.ones((1, 1, 2), np.float16)}).pieces()]
        )

    assert json.loads(asyncio.run(whole())) == {"session_id": said, "outputs": {"logits": {"data_b64": "ADwAPA=="}}}
