"""Tensor steps: what a client's tensors mean, given what its session already holds.

KV is a function of tokens alone, so a step is its new tokens: the attention mask may only mark padding, and the
positions must be the ones that follow. The session's state lives in Redis; ACCEPT extends it by compare-and-set.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import BadRequest
from blockrelay.scripts import SessionStep
from blockrelay.tensors import decode_tensor
from blockrelay_gateway.admission import wrong_step

_SESSION_ID = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
_INPUTS = ("input_ids", "attention_mask", "position_ids")

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A session as Redis has it. `step` 0 and no tokens: there is none yet."""

    step: int = 0
    fingerprint: str = ""
    tokens: tuple[int, ...] = ()

    @classmethod
    def from_redis(cls, fields: Mapping[bytes, bytes]) -> "Session":
        """From `HGETALL session:<id>`."""
        raw = fields.get(b"tokens", b"")
        return cls(
            step=int(fields.get(b"step", b"0")),
            fingerprint=fields.get(b"fp", b"").decode(),
            tokens=tuple(np.frombuffer(raw, dtype="<u4").tolist()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStep:
    """A checked step. `tokens` are all of the session's afterwards, `prior` of them from earlier steps."""

    tokens: tuple[int, ...]
    prior: int
    step: int
    session: SessionStep | None

    @property
    def new(self) -> int:
        """How many tokens the step adds."""
        return len(self.tokens) - self.prior


def check_names(session_id: str | None, step: int | None) -> int:
    """The step number. Raises BadRequest unless session and step name each other properly."""
    if session_id is None:
        if step not in (None, 1):
            raise BadRequest("step needs a session_id", param="session_id")
        return 1
    if not _SESSION_ID.fullmatch(session_id):
        raise BadRequest("session_id has 1 to 128 characters of A-Z a-z 0-9 . _ : @ -", param="session_id")
    if step is None:
        raise BadRequest("step is missing: 1 for the first of a session", param="step")
    if not 1 <= step < 2**31:
        raise BadRequest(f"step must be from 1 to {2**31 - 1}, not {step}", param="step")
    return step


def read_step(
    inputs: Mapping[str, Any],
    session: Session,
    *,
    session_id: str | None,
    step: int,
    logits: Literal["last", "all"],
    context: int,
    vocab_size: int,
) -> TensorStep:
    """What `inputs` ask for. Raises BadRequest naming the tensor, or Conflict naming the expected step."""
    for name in inputs:
        if name not in _INPUTS:
            raise BadRequest(f"input_tensors has an unknown tensor {name!r}", param=f"input_tensors.{name}")
    if "input_ids" not in inputs:
        raise BadRequest("input_tensors.input_ids is missing", param="input_tensors.input_ids")
    ids = _integers(inputs, "input_ids", context)
    mask = _integers(inputs, "attention_mask", context) if "attention_mask" in inputs else None
    positions = _integers(inputs, "position_ids", context) if "position_ids" in inputs else None
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise BadRequest(
            f"input_ids: token id {wrong[0]} is not in 0..{vocab_size - 1}", param="input_tensors.input_ids"
        )
    kept = _without_padding(ids.size, mask)
    new = tuple(ids[kept].tolist())
    fingerprint = _fingerprint(new, logits)
    if step == session.step and step > 0 and fingerprint == session.fingerprint:
        prior = session.tokens[: len(session.tokens) - len(new)]
    elif step == session.step + 1:
        prior = session.tokens
    else:
        raise wrong_step(session_id or "", step, session.step + 1)
    _check_mask(mask, ids.size, len(prior))
    _check_positions(positions, kept, ids.size, len(prior))
    part = None
    if session_id is not None:
        part = SessionStep(
            session=session_id,
            step=step,
            fingerprint=fingerprint,
            length=len(prior),
            tokens=np.array(new, dtype="<u4").tobytes(),
        )
    return TensorStep(tokens=prior + new, prior=len(prior), step=step, session=part)


def _integers(inputs: Mapping[str, Any], name: str, context: int) -> Ints:
    """A tensor of integers [1, n], flattened. A mask may cover earlier steps too, so it is bounded by the context."""
    param = f"input_tensors.{name}"
    array = decode_tensor(inputs[name], param=param, max_elements=2 * context)
    if array.dtype.kind not in "iub":
        raise BadRequest(f"{param} must hold integers, not {array.dtype.name}", param=param)
    if array.ndim != 2 or array.shape[0] != 1 or array.shape[1] == 0:
        raise BadRequest(f"{param} must have shape [1, n] (batch 1), not {list(array.shape)}", param=param)
    return array[0].astype(np.int64)


def _without_padding(size: int, mask: Ints | None) -> NDArray[np.bool_]:
    """Which of the `size` ids count: padding zeros at either end do not."""
    if mask is None:
        return np.ones(size, dtype=np.bool_)
    if mask.size < size:
        raise BadRequest(
            f"attention_mask has {mask.size} positions for {size} input_ids", param="input_tensors.attention_mask"
        )
    kept = mask[-size:] == 1
    if not np.isin(mask, (0, 1)).all() or not kept.any():
        raise BadRequest("attention_mask must be 1 for tokens and 0 for padding", param="input_tensors.attention_mask")
    places = np.flatnonzero(kept)
    if places[-1] - places[0] + 1 != places.size:
        raise BadRequest("attention_mask has a 0 between tokens", param="input_tensors.attention_mask")
    return kept


def _check_mask(mask: Ints | None, size: int, prior: int) -> None:
    """A mask covers the new ids, or the session's tokens (all ones) and the new ids."""
    if mask is None or mask.size == size:
        return
    if mask.size != prior + size or not (mask[:prior] == 1).all():
        raise BadRequest(
            f"attention_mask must cover the {size} input_ids, or the session's {prior} tokens (all 1) and them",
            param="input_tensors.attention_mask",
        )


def _check_positions(positions: Ints | None, kept: NDArray[np.bool_], size: int, prior: int) -> None:
    if positions is None:
        return
    if positions.size != size:
        raise BadRequest(
            f"position_ids has {positions.size} positions for {size} input_ids", param="input_tensors.position_ids"
        )
    if (positions[kept] != np.arange(prior, prior + int(kept.sum()))).any():
        raise BadRequest(
            f"position_ids must be consecutive from {prior}, the session's length", param="input_tensors.position_ids"
        )


def _fingerprint(tokens: tuple[int, ...], logits: str) -> str:
    """Equal for steps that ask for the same."""
    return hashlib.sha256(logits.encode() + np.array(tokens, dtype="<u4").tobytes()).hexdigest()
