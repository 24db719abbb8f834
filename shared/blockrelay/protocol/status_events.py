"""Events that show live which stage computes which request. They are never stored and nothing depends on them.

Workers publish lists of events on the channel `Keys.status_channel`; gateways and `blockrelay status --follow`
subscribe. Workers publish nothing while there is no subscriber.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from blockrelay.protocol.encoding import checks

Moment = Literal["start", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The layers `first` to `last`, counted from 0, of a model with `layers` layers.

    A stage that has only the head is shown at the last layer.
    """

    model: str
    first: int
    last: int
    layers: int

    @classmethod
    def of_blocks(cls, model: str, first: int, last: int, blocks: int) -> "Shard":
        """Returns the layers of the blocks `first` to `last`, counted from 1; the last of `blocks` is the head."""
        layers = blocks - 1
        return cls(model=model, first=min(first, layers) - 1, last=min(last, layers) - 1, layers=layers)

    def to_json(self) -> dict[str, Any]:
        """Returns the layers in the form that clients get."""
        return {
            "model": self.model,
            "start_layer": self.first,
            "end_layer": self.last,
            "n_layers": self.layers,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """The event that a stage begins or ends a step for one request."""

    node: str  # worker id
    moment: Moment
    prompt: bool  # prompt tokens enter the model in this stage; else later tokens, or hidden states from another stage
    shard: Shard
    request_id: str
    position: int  # of the step's first token
    rows: int  # tokens of the request in the step
    prompt_tokens: int  # length of the whole prompt
    elapsed_ns: int = 0  # at the end: time of the batch
    result_size: int = 0  # at the end: number of values computed for this request; 0 if the batch failed

    def to_json(self) -> dict[str, Any]:
        """Returns the event in the form that clients get."""
        whole = Shard(model=self.shard.model, first=0, last=self.shard.layers - 1, layers=self.shard.layers)
        event: dict[str, Any] = {
            "type": "node_status",
            "node_id": self.node,
            "status": f"{self.moment}_process_{'prompt' if self.prompt else 'tensor'}",
            "base_shard": whole.to_json(),
            "shard": self.shard.to_json(),
            "request_id": self.request_id,
            "inference_state": {"position": self.position, "rows": self.rows},
            "prompt_tokens": self.prompt_tokens,
        }
        if self.moment == "end":
            event |= {"elapsed_time_ns": self.elapsed_ns, "result_size": self.result_size}
        return event


def encode_events(events: Sequence[NodeStatus]) -> bytes:
    """Returns one message of the channel, a JSON list of events."""
    return json.dumps([event.to_json() for event in events]).encode()


def decode_events(message: bytes) -> list[dict[str, Any]]:
    """Returns the events of a message, each with a `request_id`. Raises WireError for anything else."""
    with checks.reading("status events"):
        events = [checks.entries(event) for event in checks.items(json.loads(message))]
        for event in events:
            checks.text(event["request_id"])
        return events
