"""Several cells behind one gateway: two names in one Redis, with a played worker in each."""

import base64
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.encoding.request_ids import own_id, parse_id
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import Claimed
from blockrelay.redis.client import Scripts
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.cells import cells
from blockrelay_gateway.cells.placement import PREFIX_TOKENS
from tests.support.gateway.played import PlayedWorker, RunningGateway, answering, running_gateway
from tests.support.gateway.sse_client import read_events
from tests.support.redis.redis_server import RedisServer
from tests.support.scraping import sampled
from tests.support.systems.cell_file import CellFile
from tests.support.waiting import wait_until

NAMES = ("c0", "c1")
BODY: dict[str, Any] = {"prompt": "Anna", "max_tokens": 4}


@pytest.fixture
def file(tmp_path: Path, redis_server: RedisServer, client: redis.Redis) -> CellFile:
    return CellFile(tmp_path / "cells.json", dict.fromkeys(NAMES, redis_server.url))


@pytest.fixture
def several(settings: GatewaySettings, file: CellFile, monkeypatch: pytest.MonkeyPatch) -> GatewaySettings:
    monkeypatch.setattr(cells, "LOOK_S", 0.02)
    return settings.model_copy(update={"cell": "c0", "cells": file.path})


@pytest.fixture
def workers(client: redis.Redis, folder: BlockFolder) -> dict[str, PlayedWorker]:
    """By cell."""
    return {name: worker_of(name, client, folder) for name in NAMES}


def worker_of(name: str, client: redis.Redis, folder: BlockFolder) -> PlayedWorker:
    scripts, keys = Scripts(client, Keys(name)), Keys(name)
    return PlayedWorker(client=client, scripts=scripts, keys=keys, model=folder.model_key).register()


@contextmanager
def all_answer(workers: Mapping[str, PlayedWorker]) -> Iterator[None]:
    """Each cell has a token of its own."""
    with ExitStack() as both:
        for index, worker in enumerate(workers.values()):
            both.enter_context(answering(worker, lambda _, token=5 + index: ([token], "stop")))
        yield


@contextmanager
def tensors_answered(workers: Mapping[str, PlayedWorker]) -> Iterator[None]:
    """Each step has the logits 0."""

    def answered_by(worker: PlayedWorker) -> Callable[[Claimed], None]:
        return lambda claimed: worker.finish_tensor(claimed, np.zeros((1, 512), np.float32))

    with ExitStack() as both:
        for worker in workers.values():
            both.enter_context(answering(worker, answered_by(worker)))
        yield


@contextmanager
def stopped(server: RedisServer) -> Iterator[None]:
    """It stands still, and goes on."""
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


def cell_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    found = parse_id(answer.headers["x-request-id"])
    assert found is not None
    return found.cell


def post(gateway: RunningGateway, key: str | None = None, **body: Any) -> httpx.Response:
    return gateway.http.post("/v1/completions", json={**BODY, **body}, headers={"Idempotency-Key": key} if key else {})


def knows(gateway: RunningGateway, version: int) -> None:
    wait_until(lambda: gateway.gateway.cells.file.lists[-1].version == version, "the gateway has read the list")


def test_an_id_names_its_cell_and_any_gateway_serves_it(
    several: GatewaySettings, file: CellFile, workers: dict[str, PlayedWorker]
) -> None:
    file.put(c0=1, c1=1)
    with running_gateway(several) as one, running_gateway(several) as other, all_answer(workers):
        answers = [post(one) for _ in range(20)]
        assert {cell_of(answer) for answer in answers} == set(NAMES), "the loads are equal, so both are drawn"
        for answer in answers:
            name, cell = answer.headers["x-request-id"], cell_of(answer)
            assert answer.json()["id"] == name.replace("req-", "cmpl-")
            shown = other.http.get(f"/v1/requests/{name}").json()
            assert (shown["request_id"], shown["status"]) == (name, "completed")
            assert shown["token_ids"] == [5 + NAMES.index(cell)]
            assert workers[cell].record(own_id(name))
            with other.http.stream("GET", f"/v1/requests/{name}/events") as stream:
                assert str(next(iter(read_events(stream))).id).startswith(f"{name}:")
            assert other.http.delete(f"/v1/requests/{name}").json()["status"] == "completed"


def test_an_id_of_another_cell_is_unknown_and_one_without_is_of_our_own(
    several: GatewaySettings, file: CellFile, workers: dict[str, PlayedWorker]
) -> None:
    file.put(c0=1, c1=0)
    with running_gateway(several) as gateway, all_answer(workers):
        name = own_id(post(gateway).headers["x-request-id"])
        assert gateway.http.get(f"/v1/requests/{name}").json()["status"] == "completed"
        answer = gateway.http.get(f"/v1/requests/{name.replace('req-', 'req-c7-')}")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "there is no cell 'c7' here, only c0, c1"
        assert gateway.http.get(f"/v1/requests/{name.replace('req-', 'req-c1-')}").status_code == 404


def test_a_key_is_one_request_whichever_list_each_gateway_has(
    several: GatewaySettings, file: CellFile, workers: dict[str, PlayedWorker]
) -> None:
    """Requests under one list are found under the next ones, and what a list has moved is refused under an older."""
    keys = [f"key-{i}" for i in range(24)]
    file.put(c0=1, c1=0)
    with running_gateway(several) as new, all_answer(workers):
        first = {key: post(new, key) for key in keys[:12]}
        assert {cell_of(answer) for answer in first.values()} == {"c0"}
        file.put(c0=0, c1=1)
        knows(new, 2)
        for key, answer in first.items():
            again = post(new, key)
            assert again.json() == answer.json() and again.headers["idempotent-replayed"] == "true"
        assert {cell_of(post(new, key)) for key in keys[12:]} == {"c1"}, "new ones go by the new list"
        file.put(c0=1, c1=0)
        knows(new, 3)
        assert [cell_of(post(new, key)) for key in keys] == ["c0"] * 12 + ["c1"] * 12
    runs = [int(worker.client.hget(worker.keys.totals(worker.model), "accepted") or 0) for worker in workers.values()]  # pyright: ignore
    assert sum(runs) == len(keys)


def test_a_gateway_that_has_not_read_the_newer_list_is_refused(
    several: GatewaySettings, file: CellFile, workers: dict[str, PlayedWorker], tmp_path: Path
) -> None:
    before = tmp_path / "before.json"
    before.write_text(file.put(c0=1, c1=0).path.read_text())
    file.put(c0=0, c1=1)
    late = several.model_copy(update={"cells": before})
    with running_gateway(late) as old, running_gateway(several) as new, all_answer(workers):
        first = post(new, "k")
        assert cell_of(first) == "c1"
        refused = post(old, "k")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert "version 2 of the list of cells" in refused.json()["error"]["message"]
        assert post(new, "k").json() == first.json()
        assert cell_of(post(old, "another")) == cell_of(post(new, "another")) == "c0", "the older one came first"
    assert workers["c0"].client.zcard(workers["c0"].keys.running) == 0


def step(gateway: RunningGateway, session: str, number: int, *tokens: int, rows: int = 1) -> httpx.Response:
    ids = np.array([tokens] * rows, np.int64)
    tensor = {
        "_tensor_": True,
        "dtype": "int64",
        "shape": list(ids.shape),
        "data_b64": base64.b64encode(ids.tobytes()).decode(),
    }
    return gateway.http.post(
        "/v1/infer", json={"input_tensors": {"input_ids": tensor}, "session_id": session, "step": number}
    )


def session_in(client: redis.Redis, session: str) -> set[str]:
    return {name for name in NAMES if any(client.exists(Keys(name).session(one)) for one in (session, f"{session}#0"))}


@pytest.mark.parametrize("rows", [1, 2])
def test_all_steps_of_a_session_go_to_the_cell_where_it_began(
    several: GatewaySettings, file: CellFile, workers: dict[str, PlayedWorker], client: redis.Redis, rows: int
) -> None:
    file.put(c0=1, c1=0)
    with running_gateway(several) as gateway, tensors_answered(workers):
        assert step(gateway, "old", 1, 5, 6, rows=rows).status_code == 200
        assert session_in(client, "old") == {"c0"}
        file.put(c0=0, c1=1)
        knows(gateway, 2)
        assert step(gateway, "old", 1, 5, 6, rows=rows).status_code == 200, "the same step again"
        assert step(gateway, "old", 2, 7, rows=rows).status_code == 200
        assert step(gateway, "new", 1, 5, rows=rows).status_code == 200
        assert (session_in(client, "old"), session_in(client, "new")) == ({"c0"}, {"c1"})
        late = step(gateway, "nowhere", 3, 7, rows=rows)
        assert late.status_code == 409 and "expects step 1" in late.json()["message"]


def test_a_cell_that_comes_is_served_at_once_and_one_that_goes_no_more(
    several: GatewaySettings, file: CellFile, workers: dict[str, PlayedWorker]
) -> None:
    file.put(cells=("c0",), c0=1)
    with running_gateway(several) as gateway, all_answer(workers):
        assert gateway.http.get("/v1/requests/req-c1-" + "0" * 24).json()["error"]["param"] == "cell"
        file.put(c0=0, c1=1)
        knows(gateway, 2)
        name = post(gateway).headers["x-request-id"]
        assert name.startswith("req-c1-") and gateway.http.get(f"/v1/requests/{name}").status_code == 200
        file.put(cells=("c0",), c0=1)
        knows(gateway, 3)
        assert gateway.http.get(f"/v1/requests/{name}").status_code == 404
        assert cell_of(post(gateway)) == "c0"


@pytest.mark.parametrize("content", ["{", '{"cells": {}, "lists": []}', None])
def test_a_file_that_cannot_be_used_changes_nothing(
    several: GatewaySettings,
    file: CellFile,
    workers: dict[str, PlayedWorker],
    content: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file.put(c0=1, c1=0)
    with running_gateway(several) as gateway, all_answer(workers):
        file.path.unlink() if content is None else file.path.write_text(content)
        wait_until(lambda: "CELLS_UNREADABLE" in capsys.readouterr().out, "it says so")
        assert cell_of(post(gateway)) == "c0"
        file.put(c0=0, c1=1)
        knows(gateway, 2)


def test_metrics_are_told_of_each_cell(
    several: GatewaySettings, file: CellFile, workers: dict[str, PlayedWorker]
) -> None:
    file.put(c0=0, c1=1)
    with running_gateway(several) as gateway, all_answer(workers):
        post(gateway)
        text = gateway.http.get("/metrics").text
    assert text.count("# TYPE blockrelay_request_success_total counter") == 1
    for name, ended in zip(NAMES, (0, 1), strict=True):
        assert sampled(text, "blockrelay_request_success_total", cell=name, finished_reason="stop") == ended
        assert sampled(text, "blockrelay_ready", cell=name, question="tokens") == 1


def test_the_plan_of_a_cell_is_asked_for_by_its_name(
    several: GatewaySettings, file: CellFile, workers: dict[str, PlayedWorker]
) -> None:
    file.put(c0=1, c1=1)
    with running_gateway(several) as gateway:
        own, other = gateway.http.get("/v1/plan"), gateway.http.get("/v1/plan", params={"cell": "c1"})
        assert own.json()["missing"] == other.json()["missing"] == []
        assert gateway.http.get("/v1/plan", params={"cell": "c7"}).status_code == 404


@pytest.fixture
def apart(own_redis: RedisServer, file: CellFile) -> CellFile:
    """The cell c1 has a Redis of its own, which may die."""
    file.urls["c1"] = own_redis.url
    return file


def test_new_work_goes_on_while_a_cell_is_away_and_what_belongs_there_waits(
    several: GatewaySettings, apart: CellFile, own_redis: RedisServer, folder: BlockFolder, client: redis.Redis
) -> None:
    there = {"c0": client, "c1": own_redis.client()}
    workers = {name: worker_of(name, at, folder) for name, at in there.items()}
    apart.put(c0=1, c1=1)
    prompts = [[5 + i] * (2 * PREFIX_TOKENS) for i in range(12)]
    with running_gateway(several) as gateway:
        with all_answer(workers):
            homes = [cell_of(post(gateway, prompt=prompt)) for prompt in prompts]
            keyed = {key: cell_of(post(gateway, key)) for key in map(str, range(12))}
        assert set(homes) == set(keyed.values()) == set(NAMES)
        own_redis.kill()
        wait_until(lambda: not gateway.gateway.cells.named("c1").reachable, "the gateway has noticed")
        with all_answer({"c0": workers["c0"]}):
            for home, prompt in zip(homes, prompts, strict=True):
                answer = post(gateway, prompt=prompt)
                assert cell_of(answer) == "c0"
                assert answer.headers.get("blockrelay-instead-of") == (None if home == "c0" else "c1")
            for key, home in keyed.items():
                answer = post(gateway, key)
                assert answer.status_code == (200 if home == "c0" else 503)
        ready = gateway.http.get("/readyz")
        assert ready.status_code == 200 and ready.json()["reasons"][0].startswith("c1: Redis does not answer")
        assert sampled(gateway.http.get("/metrics").text, "blockrelay_ready", cell="c1", question="accepting") == 0
    there["c1"].close()


def test_a_session_is_found_while_another_cell_is_away(
    several: GatewaySettings, apart: CellFile, own_redis: RedisServer, folder: BlockFolder, client: redis.Redis
) -> None:
    """Even where that one comes first by the list in force; what is in none that answers may be there."""
    worker = worker_of("c0", client, folder)
    apart.put(c0=1, c1=0)
    with running_gateway(several) as gateway, tensors_answered({"c0": worker}):
        assert step(gateway, "old", 1, 5, 6).status_code == 200
        apart.put(c0=0, c1=1)
        knows(gateway, 2)
        own_redis.kill()
        wait_until(lambda: not gateway.gateway.cells.named("c1").reachable, "the gateway has noticed")
        assert step(gateway, "old", 2, 7).status_code == 200
        elsewhere = step(gateway, "nowhere", 3, 7)
        assert elsewhere.status_code == 503 and "cell c1" in elsewhere.json()["message"]


def test_a_cell_that_stands_still_keeps_no_probe_waiting(
    several: GatewaySettings, apart: CellFile, own_redis: RedisServer, workers: dict[str, PlayedWorker]
) -> None:
    """Else a balancer takes every gateway out, and the other cells with it."""
    apart.put(c0=1, c1=1)
    with running_gateway(several) as gateway, stopped(own_redis):
        for path in ("/readyz", "/readyz?for=accepting"):
            ready = gateway.http.get(path, timeout=4)
            assert ready.status_code == 200
            assert [reason for reason in ready.json()["reasons"] if reason.startswith("c1: Redis does not answer")]


def test_what_has_begun_in_a_cell_that_answers_is_answered_while_a_former_one_is_away(
    several: GatewaySettings, apart: CellFile, own_redis: RedisServer, folder: BlockFolder, client: redis.Redis
) -> None:
    worker = worker_of("c0", client, folder)
    apart.put(c0=0, c1=1).put(c0=1, c1=0)
    with running_gateway(several) as gateway, all_answer({"c0": worker}), tensors_answered({}):
        first = post(gateway, "k")
        given_up = post(gateway, "given up").headers["x-request-id"]
        own_redis.kill()
        wait_until(lambda: not gateway.gateway.cells.named("c1").reachable, "the gateway has noticed")
        again = post(gateway, "k")
        assert again.json() == first.json() and again.headers["idempotent-replayed"] == "true"
        new = post(gateway, "new")
        assert new.status_code == 503 and "cell c1" in new.json()["error"]["message"]
        client.hset(worker.keys.request(own_id(given_up)), "abandoned", "1")
        assert post(gateway, "given up").status_code == 503, "it may have begun anew in c1"


def test_requests_that_nothing_binds_go_where_workers_are(
    several: GatewaySettings, file: CellFile, client: redis.Redis, folder: BlockFolder
) -> None:
    file.put(c0=1, c1=1)
    worker = worker_of("c0", client, folder)
    prompts = [[5 + i] * PREFIX_TOKENS for i in range(12)]
    with running_gateway(several) as gateway, all_answer({"c0": worker}):
        cells = gateway.gateway.cells
        wait_until(lambda: [cell.readiness.serves for cell in cells] == [True, False], "it has looked")
        answers = [post(gateway, prompt=prompt) for prompt in [*prompts, *["Anna"] * 12]]
        assert {cell_of(answer) for answer in answers} == {"c0"}
        assert {answer.headers.get("blockrelay-instead-of") for answer in answers} == {None, "c1"}


def test_prompts_that_begin_alike_stay_in_one_cell_while_it_has_little_to_do(
    several: GatewaySettings, file: CellFile, workers: dict[str, PlayedWorker]
) -> None:
    """What has ended counts no more, long before the cell is asked again how much is under way."""
    file.put(c0=1, c1=1)
    with running_gateway(several) as gateway, all_answer(workers):
        answers = [post(gateway, prompt=[5] * PREFIX_TOKENS) for _ in range(12)]
        assert len({cell_of(answer) for answer in answers}) == 1


def test_a_file_that_would_make_one_key_two_requests_is_refused(
    several: GatewaySettings, file: CellFile, workers: dict[str, PlayedWorker], capsys: pytest.CaptureFixture[str]
) -> None:
    older = file.put(c0=1, c1=0).path.read_text()
    with running_gateway(several) as gateway, all_answer(workers):
        file.put(c0=0, c1=1)
        knows(gateway, 2)
        file.path.write_text(older)
        said = read_until(capsys, "CELLS_UNREADABLE")
        assert "lists: version 2 is missing" in said
        assert cell_of(post(gateway)) == "c1"


def read_until(capsys: pytest.CaptureFixture[str], event: str) -> str:
    said = ""

    def there() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return event in said

    wait_until(there, f"a line {event}")
    return said


def test_our_own_cell_stays_when_it_is_taken_out_and_an_address_is_no_news_twice(
    several: GatewaySettings, file: CellFile, workers: dict[str, PlayedWorker], capsys: pytest.CaptureFixture[str]
) -> None:
    file.put(c0=1, c1=0)
    with running_gateway(several) as gateway, all_answer(workers):
        name = post(gateway).headers["x-request-id"]
        file.put(cells=("c1",), c1=1)
        assert "cell=c0" in read_until(capsys, "CELL_KEPT")
        knows(gateway, 2)
        assert cell_of(post(gateway)) == "c1"
        assert gateway.http.get(f"/v1/requests/{name}").status_code == 200
        original, file.urls["c1"] = file.urls["c1"], "redis://elsewhere:6379/0"
        file.put(c0=0, c1=1)
        assert "cells=['c1']" in read_until(capsys, "CELLS_MOVED")
        file.urls["c1"] = original
        file.put(c0=0, c1=1)
        knows(gateway, 4)
        assert "CELLS_MOVED" not in capsys.readouterr().out


def test_trouble_is_that_of_the_cell_that_has_it(
    several: GatewaySettings, apart: CellFile, own_redis: RedisServer, workers: dict[str, PlayedWorker]
) -> None:
    apart.put(c0=1, c1=1)
    with running_gateway(several) as gateway:
        own_redis.kill()
        assert gateway.http.get("/v1/requests/req-c1-" + "0" * 24).status_code == 503
        text = gateway.http.get("/metrics").text
    assert sampled(text, "blockrelay_redis_errors_total", cell="c1") > 0
    assert sampled(text, "blockrelay_redis_errors_total", cell="c0") == 0
