"""Requests made from /openapi.json, right and wrong ones, against a whole system: no 5xx, no status or body that the
document does not name."""

import json
import os
import subprocess

import httpx
import pytest

from blockrelay.settings import BUNDLED_MODEL
from tests.support.systems.up_process import running_up

EXAMPLES = os.environ.get("EXAMPLES", "300")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.fuzz
@pytest.mark.timeout(900)
def test_no_request_brings_a_5xx_or_an_undocumented_answer() -> None:
    schemathesis = os.environ.get("SCHEMATHESIS", "schemathesis")
    with running_up(BUNDLED_MODEL, "--stages", "2") as up:
        document = httpx.get(f"{up.url}/openapi.json").json()
        assert {"/v1/completions", "/v1/chat/completions", "/v1/infer"} <= set(document["paths"])
        command = [schemathesis, "run", f"{up.url}/openapi.json", "--checks", CHECKS, "--max-examples", EXAMPLES]
        result = subprocess.run([*command, "--request-timeout", "60"], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
        left = httpx.get(f"{up.url}/readyz")
        assert left.status_code == 200, json.dumps(left.json())
