"""The header `Prefer` of RFC 7240."""

import pytest

from blockrelay_gateway.api.client_headers import wanted_wait_s
from tests.support.gateway.played import RunningGateway

BODY = {"prompt": "x", "max_tokens": 8, "temperature": 0}


@pytest.mark.parametrize(
    "value", ["wait=soon", "wait=-1", "wait=1.5", "wait", "wait=", "respond-async, wait=x", 'wait="1']
)
def test_what_is_no_number_of_seconds_is_refused(gateway: RunningGateway, value: str) -> None:
    refused = gateway.http.post("/v1/completions", json=BODY, headers={"prefer": value})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Prefer")


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        ([], 0),
        (["respond-async"], 0),
        (["wait=10"], 10),
        (["WAIT = 10"], 10),
        (['wait="10"'], 10),
        (["respond-async, wait=10;x=1", "wait=20"], 10),
        (['foo="a, wait=x", handling=lenient', "wait=7"], 7),
        (["waiting=5"], 0),
        (["wait=999999"], 50),
        (["wait=10000000000"], 50),
    ],
)
def test_the_first_wait_among_the_preferences_counts(values: list[str], seconds: float) -> None:
    assert wanted_wait_s(values) == seconds
