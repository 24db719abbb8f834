"""Bodies that want many times their size in memory, and steps whose answers are large."""

import json
from typing import Any

MIB = 1 << 20
#: The largest body that a gateway reads by default, less what a head may add.
MOST = 8 * MIB - 1000


def hostile_bodies() -> list[tuple[str, bytes]]:
    """A path and a body for it, of each kind."""
    tensor = {"_tensor_": True, "data": [[1] * 1000] * 2500}
    part = {"type": "text", "text": "And then she went on. "}
    chat = {"messages": [{"role": "user", "content": [part] * 60_000}] * 2}
    return [
        ("/v1/completions", json.dumps({"prompt": "a" * (4 * MIB)}).encode()),
        ("/v1/completions", b'{"prompt": "x", "metadata": [' + b"{}," * (MOST // 3 - 20) + b"{}]}"),
        ("/v1/completions", json.dumps({"prompt": [7] * (MOST // 3 - 20)}).encode()),
        ("/v1/infer", json.dumps({"input_tensors": {"input_ids": tensor}}).encode()),
        ("/v1/chat/completions", json.dumps(chat).encode()),
    ]


def step_with_all_logits(tokens: int) -> dict[str, Any]:
    """The body of a step that answers with the logits of each of so many tokens."""
    return {"input_tensors": {"input_ids": [[5] * tokens]}, "logits": "all"}
