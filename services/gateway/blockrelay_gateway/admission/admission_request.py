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

    open_ended: bool = False
    """Its client named no `max_tokens`, and those of `params` are what the context has room for."""
    expected_tokens: int | None = None
    """New tokens that admission counts for it; None: all that it may generate."""

    @property
    def tokens(self) -> int:
        """Tokens that it is charged when it is accepted: its prompt, and those that it is expected to generate."""
        new = self.params.max_tokens if self.expected_tokens is None else self.expected_tokens
        return int(self.body.prompt.size) + new
