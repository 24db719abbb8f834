"""What ACCEPT is asked for."""

from dataclasses import dataclass

from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.protocol.transitions import SessionStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One request, checked and ready for ACCEPT. `timeout_s` None: the gateway's default; `fingerprint`: `identity`."""

    request: str
    fingerprint: str = ""
    body: RequestBody
    params: SamplingParams
    timeout_s: float | None = None
    priority: int | None = None
    session: SessionStep | None = None
    result_bytes: int = 0  # what its tensor result takes of the payload Redis
