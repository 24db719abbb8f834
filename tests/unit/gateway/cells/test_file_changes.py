"""The file of cells changes under a gateway that runs."""

import pytest

from blockrelay.settings import GatewaySettings
from tests.support.gateway.played import PlayedWorker, running_gateway
from tests.support.gateway.several_cells import all_answer, cell_of, knows, post
from tests.support.systems.cell_file import CellFile
from tests.support.waiting import wait_until


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
        file.path.unlink() if content is None else file.replace(content)
        wait_until(lambda: "CELLS_UNREADABLE" in capsys.readouterr().out, "it says so")
        assert cell_of(post(gateway)) == "c0"
        file.put(c0=0, c1=1)
        knows(gateway, 2)


def test_a_file_that_would_make_one_key_two_requests_is_refused(
    several: GatewaySettings, file: CellFile, workers: dict[str, PlayedWorker], capsys: pytest.CaptureFixture[str]
) -> None:
    older = file.put(c0=1, c1=0).path.read_text()
    with running_gateway(several) as gateway, all_answer(workers):
        file.put(c0=0, c1=1)
        knows(gateway, 2)
        file.replace(older)
        said = read_until(capsys, "CELLS_UNREADABLE")
        assert "lists: version 2 is missing" in said
        assert cell_of(post(gateway)) == "c1"


def read_until(capsys: pytest.CaptureFixture[str], event: str) -> str:
    """What was printed until a whole line names `event`."""
    said = ""

    def there() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return event in said[: said.rfind("\n") + 1]

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
