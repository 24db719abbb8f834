"""Several cells behind one gateway: two names in one Redis, with a played worker in each."""

from pathlib import Path

import pytest
import redis

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.cells.placement import PREFIX_TOKENS
from tests.support.gateway.played import PlayedWorker, running_gateway
from tests.support.gateway.several_cells import (
    NAMES,
    all_answer,
    cell_of,
    knows,
    post,
    session_in,
    step,
    tensors_answered,
    worker_of,
)
from tests.support.gateway.sse_client import read_events
from tests.support.scraping import sampled
from tests.support.systems.cell_file import CellFile
from tests.support.waiting import wait_until


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


def test_metrics_are_told_of_each_cell(
    several: GatewaySettings, file: CellFile, workers: dict[str, PlayedWorker]
) -> None:
    file.put(c0=0, c1=1)
    with running_gateway(several) as gateway, all_answer(workers):
        post(gateway)
        text = gateway.http.get("/metrics").text
    assert text.count("# TYPE blockrelay_finished_requests_total counter") == 1
    for name, ended in zip(NAMES, (0, 1), strict=True):
        assert sampled(text, "blockrelay_finished_requests_total", cell=name, finished_reason="stop") == ended
        assert sampled(text, "blockrelay_ready", cell=name, question="tokens") == 1


def test_the_plan_of_a_cell_is_asked_for_by_its_name(
    several: GatewaySettings, file: CellFile, workers: dict[str, PlayedWorker]
) -> None:
    file.put(c0=1, c1=1)
    with running_gateway(several) as gateway:
        own, other = gateway.http.get("/v1/plan"), gateway.http.get("/v1/plan", params={"cell": "c1"})
        assert own.json()["missing"] == other.json()["missing"] == []
        assert gateway.http.get("/v1/plan", params={"cell": "c7"}).status_code == 404


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
