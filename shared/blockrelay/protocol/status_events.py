"""What stages are doing right now, told to whoever follows: never stored, never truth.

Workers publish lists of these on `Keys.status_channel`; gateways and `blockrelay status --follow` subscribe. Nothing is
published while nobody does.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from blockrelay.protocol.encoding import checks

Moment = Literal["start", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Layers [first, last], counted from 0, of a model with `layers`. A stage of the head alone is at the last one."""

    model: str
    first: int
    last: int
    layers: int

    @classmethod
    def of_blocks(cls, model: str, first: int, last: int, blocks: int) -> "Shard":
        """Of blocks [first, last], counted from 1; the last of `blocks` is the head."""
        layers = blocks - 1
        return cls(model=model, first=min(first, layers) - 1, last=min(last, layers) - 1, layers=layers)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "start_layer": self.first,
            "end_layer": self.last,
            "n_layers": self.layers,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A stage begins or ends a step for one request.

    `prompt`: rows of the prompt enter the model here; else rows of later tokens, or rows from the stage before.
    `position` and `rows` of the step; `prompt_tokens` is the length of the prompt. At the end `elapsed_ns` of the batch
    and `result_size`, the values that came out of this request's rows (0 if the batch failed).
    """

    node: str
    moment: Moment
    prompt: bool
    shard: Shard
    request: str
    position: int
    rows: int
    prompt_tokens: int
    elapsed_ns: int = 0
    result_size: int = 0

    def to_json(self) -> dict[str, Any]:
        """As clients see it."""
        whole = Shard(model=self.shard.model, first=0, last=self.shard.layers - 1, layers=self.shard.layers)
        told: dict[str, Any] = {
            "type": "node_status",
            "node_id": self.node,
            "status": f"{self.moment}_process_{'prompt' if self.prompt else 'tensor'}",
            "base_shard": whole.to_json(),
            "shard": self.shard.to_json(),
            "request_id": self.request,
            "inference_state": {"position": self.position, "rows": self.rows},
            "prompt_tokens": self.prompt_tokens,
        }
        if self.moment == "end":
            told |= {"elapsed_time_ns": self.elapsed_ns, "result_size": self.result_size}
        return told


def encode_events(events: Sequence[NodeStatus]) -> bytes:
    """One message."""
    return json.dumps([event.to_json() for event in events]).encode()


def decode_events(message: bytes) -> list[dict[str, Any]]:
    """The events of a message, each with a `request_id`. WireError for what is none."""
    with checks.reading("status events"):
        events = [checks.entries(event) for event in checks.items(json.loads(message))]
        for event in events:
            checks.text(event["request_id"])
        return events
