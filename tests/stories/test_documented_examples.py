"""The examples of bodies in /openapi.json work as they stand, and are answered as the document says."""

from typing import Any

import httpx
from jsonschema import Draft202012Validator

from blockrelay.settings import BUNDLED_MODEL
from tests.support.systems.up_process import running_up


def test_every_example_is_answered_as_documented() -> None:
    with running_up(BUNDLED_MODEL) as up, httpx.Client(base_url=up.url, timeout=30, trust_env=False) as http:
        document = http.get("/openapi.json").json()
        sent = {path: _example(document, post["post"]) for path, post in document["paths"].items() if "post" in post}
        assert sent.pop("/v1/requests/{request_id}/cancel") is None, "it has no body"
        assert len(sent) >= 5
        for path, body in sent.items():
            answer = http.post(path, json=body)
            assert answer.status_code == 200, f"{path}: {answer.text}"
            schema = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
            Draft202012Validator({**schema, "components": document["components"]}).validate(answer.json())


def _example(document: dict[str, Any], operation: dict[str, Any]) -> dict[str, Any] | None:
    """The one example of an operation's body; None where it has no body."""
    if "requestBody" not in operation:
        return None
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    (example,) = document["components"]["schemas"][name]["examples"]
    return example
