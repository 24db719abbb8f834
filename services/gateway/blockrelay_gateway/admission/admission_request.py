"""A checked request of any API, in the form that `Admission` accepts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.protocol.transitions.calls import SessionStep


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """One prompt, or one row of the `input_ids` of a /v1/infer step, with everything that decides its answer."""

    request_id: str
    """Id of the request in its cell."""
    fingerprint: str = ""
    """Hash of the body of a keyed request; "" without an Idempotency-Key."""
    body: RequestBody
    params: SamplingParams
    timeout_s: float | None = None
    """Seconds; None: the gateway's default."""
    priority: int | None = None
    """A lower one is claimed earlier; None: the tenant's usual one."""
    session: SessionStep | None = None
    result_bytes: int = 0
    """Bytes of the payload Redis that its tensor result and KV take."""
    given: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """KV pages that its client sent, raw; keys are `<page>.<layer>`, with pages of 16 positions. Both count from 0."""

    open_ended: bool = False
    """The client named no `max_tokens`, and that of `params` is what the context has room for."""
    expected_tokens: int | None = None
    """New tokens that admission counts; None: all that the request may generate."""

    @property
    def tokens(self) -> int:
        """Tokens that are charged at acceptance: the prompt's, and the new ones that admission counts."""
        new = self.params.max_tokens if self.expected_tokens is None else self.expected_tokens
        return int(self.body.prompt.size) + new
