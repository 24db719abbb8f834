"""What a client sees of its request while the workers of its numerics id leave: whom it waits for, who went on."""

from typing import Any

import pytest

from blockrelay.protocol.transitions import calls
from tests.support.gateway.played import NUMERICS, SPLIT, PlayedWorker, RunningGateway
from tests.support.worker.registering import announce

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8},
    "/v1/infer": {"prompt": [5, 6], "max_tokens": 8},
}


def begun(gateway: RunningGateway, worker: PlayedWorker, route: str, **more: Any) -> str:
    """The id of a background request that has two tokens when its workers leave."""
    answer = gateway.post(route, **ROUTES[route], background=True, **more)
    assert answer.status_code == 202, answer.text
    claimed = worker.take([7, 8])
    for name in worker.names:
        worker.scripts.run(calls.dead(name, silent_s=0, reason="drain"))
    return claimed.request_id


def shown(gateway: RunningGateway, request_id: str) -> dict[str, Any]:
    return gateway.http.get(f"/v1/requests/{request_id}").json()


def newcomers_take(worker: PlayedWorker) -> list[calls.Claimed]:
    """Announces workers of another numerics id, which ask for work; no worker of the old id is left."""
    for stage, name in enumerate(("n0", "n1")):
        announce(
            worker.client, worker.keys, name,
            model=worker.model, split=SPLIT, stage=stage, pages=1000, slots=64, numerics="other",
        )  # fmt: skip
    worker.scripts.run(calls.migrate(worker.model, patience_s=0))
    return worker.scripts.run(calls.claim("n0", 4, free_pages=1000))


def test_a_request_says_whom_it_waits_for_and_who_computed_what(gateway: RunningGateway, worker: PlayedWorker) -> None:
    request_id = begun(gateway, worker, "/v1/completions")
    seen = shown(gateway, request_id)
    assert (seen["status"], seen["waits_for_numerics_id"], seen["system_fingerprint"]) == ("queued", NUMERICS, NUMERICS)
    assert seen["timeline"][-1]["numerics_id"] == NUMERICS
    (claimed,) = newcomers_take(worker)
    assert shown(gateway, request_id)["waits_for_numerics_id"] is None
    worker.say(claimed, [9], end="stop")
    seen = shown(gateway, request_id)
    assert (seen["status"], seen["token_ids"]) == ("completed", [7, 8, 9])
    assert seen["system_fingerprint"] == f"{NUMERICS}+other@2"


@pytest.mark.parametrize("route", ROUTES)
def test_an_exact_request_ends_with_an_error_that_says_why(
    gateway: RunningGateway, worker: PlayedWorker, route: str
) -> None:
    request_id = begun(gateway, worker, route, exact=True)
    assert newcomers_take(worker) == []
    seen = shown(gateway, request_id)
    assert (seen["status"], seen["error"]["code"]) == ("failed", "numerics_changed")
    assert NUMERICS in seen["error"]["message"] and seen["system_fingerprint"] == NUMERICS


def test_a_tensor_step_knows_the_field_too(gateway: RunningGateway, worker: PlayedWorker) -> None:
    """It is computed in one go, by one id, whatever it asks for."""
    tensors = {"input_ids": {"_tensor_": True, "data": [[5, 6]]}}
    wrong = gateway.post("/v1/infer", session_id="s", step=1, input_tensors=tensors, exact="yes")
    assert wrong.status_code == 400 and "exact" in wrong.text
