"""KV of a session by blocks: taken out of one deployment, given to another, which goes on with the same bits."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from blockrelay.protocol.tensors import decode_tensor
from tests.support.json_tensors import json_tensor
from tests.support.models.tiny_model import BLOCKS, write_tiny_model
from tests.support.systems.up_process import running_up

#: Two full pages and a part of a third.
TOKENS = [(7 * position + 3) % 500 for position in range(37)]
LAYERS = BLOCKS - 1


def infer(http: httpx.Client, tokens: list[int], **more: Any) -> dict[str, Any]:
    given = more.pop("given", {})
    body = {"input_tensors": {"input_ids": [tokens], **given}, **more}
    answer = http.post("/v1/infer", json=body).json()
    assert answer["status"] == "success", answer
    return answer


def output(answer: dict[str, Any], name: str) -> Any:
    return decode_tensor(answer["outputs"][name], param=name, max_elements=1 << 22)


@pytest.mark.parametrize("stages", ["1", "3"])
def test_kv_by_blocks_goes_from_one_deployment_to_another(tmp_path: Path, stages: str) -> None:
    model = write_tiny_model(tmp_path)
    with running_up(model, "--stages", "2") as up, httpx.Client(base_url=up.url, timeout=60) as http:
        first = infer(http, TOKENS[:36], session_id="s", step=1, blocks="1-2")
        assert sorted(first["outputs"]) == [
            "logits",
            *(f"present.{i}.{half}" for i in (0, 1) for half in ("key", "value")),
        ]
        second = infer(http, TOKENS[:36], blocks=f"3-{BLOCKS}")
        whole = infer(http, TOKENS[36:], session_id="s", step=2)
        own = infer(http, TOKENS, blocks=f"1-{BLOCKS}")
        seen = http.get("/v1/sessions/s").json()
        assert (seen["step"], seen["rows"], seen["tokens"], seen["states"]) == (2, 1, [37], ["completed"])
        assert [(stage["stage"], stage["pages"], stage["there"]) for stage in seen["stages"]] == [
            (0, 3, True),
            (1, 3, True),
        ]
        assert sum(stage["layers"] for stage in seen["stages"]) == LAYERS
        one = output(own, "present.0.key")[:, :, :1].nbytes * 2
        assert [stage["kv_bytes"] for stage in seen["stages"]] == [
            48 * stage["layers"] * one for stage in seen["stages"]
        ]
        assert http.get("/v1/sessions/other").status_code == 404
        assert up.stop() == 0
    past = {
        f"past_key_values.{layer}.{half}": (first if layer < 2 else second)["outputs"][f"present.{layer}.{half}"]
        for layer in range(LAYERS)
        for half in ("key", "value")
    }
    assert output(first, "present.0.key").shape == output(own, "present.0.key")[:, :, :36].shape

    with running_up(model, "--stages", stages) as up, httpx.Client(base_url=up.url, timeout=60) as http:
        merged = infer(http, TOKENS, given=past, blocks=f"1-{BLOCKS}")
        assert merged["execution_stats"]["cached_tokens"] == 32, "the full pages were not computed"
        assert output(merged, "logits").tobytes() == output(whole, "logits").tobytes()
        for layer in range(LAYERS):
            for half in ("key", "value"):
                name = f"present.{layer}.{half}"
                assert output(merged, name).tobytes() == output(own, name).tobytes(), name

        other = np.zeros_like(output(first, "present.0.value"))
        changed = infer(http, TOKENS, given=past | {"past_key_values.0.value": json_tensor(other)})
        assert output(changed, "logits").tobytes() != output(whole, "logits").tobytes(), "given KV is what is used"
        assert infer(http, TOKENS)["outputs"] == {"logits": whole["outputs"]["logits"]}, "and by nobody else"
        assert up.stop() == 0
