"""What a client asks for, checked and in our words: what `Admission` accepts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.protocol.transitions.calls import SessionStep


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """One request. `timeout_s` None: the gateway's default; `fingerprint`: `idempotency`."""

    request: str
    fingerprint: str = ""
    body: RequestBody
    params: SamplingParams
    timeout_s: float | None = None
    priority: int | None = None
    session: SessionStep | None = None
    result_bytes: int = 0  # what its tensor result, and KV, takes of the payload Redis
    given: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  # KV that its client gave, by `kv_pages.field`

    @property
    def tokens(self) -> int:
        """Of the prompt, and those that it may generate."""
        return int(self.body.prompt.size) + self.params.max_tokens
