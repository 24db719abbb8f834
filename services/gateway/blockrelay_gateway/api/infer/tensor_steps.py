"""Checks the tensors of a tensor step against its session, and returns the step of each row. Pure.

KV is a function of tokens alone, so a step is its new tokens: the attention mask may only mark padding, and the
positions must be the ones that follow. The session's state lives in Redis; ACCEPT extends it by compare-and-set.

A batch of several rows has a session for each row (`row_session`), all at the same step.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import BadRequest
from blockrelay.protocol.messages import MAX_CHOICES
from blockrelay.protocol.tensors import decode_tensor
from blockrelay.protocol.transitions.calls import SessionStep
from blockrelay_gateway.admission.refusals import wrong_step

_SESSION_ID = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
_INPUTS = ("input_ids", "attention_mask", "position_ids")

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The session of one row as Redis has it; `step` 0 without tokens stands for a session that does not exist."""

    step: int = 0
    """Number of its last step, from 1."""
    fingerprint: str = ""
    """SHA-256 of the last step's content, by which a repeated step is recognised."""
    tokens: tuple[int, ...] = ()
    """The tokens of all its steps."""

    @classmethod
    def from_redis(cls, fields: Mapping[bytes, bytes]) -> "Session":
        """Decodes the reply of `HGETALL session:<id>`."""
        raw = fields.get(b"tokens", b"")
        return cls(
            step=int(fields.get(b"step", b"0")),
            fingerprint=fields.get(b"fingerprint", b"").decode(),
            tokens=tuple(np.frombuffer(raw, dtype="<u4").tolist()),
        )


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a step, int64, of the same number of rows; `mask` and `positions` are None if not sent.

    `ids` is [rows, n]. The other two may have another number of columns: `read_steps` checks them against `ids`.
    """

    ids: Ints
    mask: Ints | None
    positions: Ints | None

    @property
    def rows(self) -> int:
        """Number of rows of the batch."""
        return int(self.ids.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStep:
    """A checked step of one row."""

    tokens: tuple[int, ...]
    """All tokens of the session after the step."""
    prior: int
    """Number of `tokens` that earlier steps have computed."""
    step: int
    session: SessionStep | None
    """The change of the session in Redis; None for a step without a session."""
    column: int = 0
    """Column of its first new token in `input_ids`, behind padding."""

    @property
    def new(self) -> int:
        """Number of tokens that the step adds."""
        return len(self.tokens) - self.prior


def check_names(session_id: str | None, step: int | None) -> int:
    """Returns the step number; 1 for a step without a session.

    Raises BadRequest for a malformed session id, a session without a step, a step out of range, and a step other than 1
    without a session.
    """
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


def row_session(session_id: str, row: int, rows: int) -> str:
    """The session id of one of a step's `rows`: the client's own id for a single row, else one that no client can send.

    `row` counts from 0.
    """
    return session_id if rows == 1 else f"{session_id}#{row}"


def other_shapes(session_id: str, rows: int) -> list[str]:
    """Session ids that exist only if the session was begun with a number of rows other than `rows`.

    They show a session of one row, or of more rows; one of fewer rows lacks ids of `row_session` instead.
    """
    return [f"{session_id}#0"] if rows == 1 else [session_id, f"{session_id}#{rows}"]


def read_inputs(inputs: Mapping[str, Any], *, context: int, vocab_size: int) -> Inputs:
    """Decodes the tensors of a step and checks shapes, types and token ids.

    `inputs` has the undecoded JSON tensors by name: `input_ids`, and perhaps `attention_mask` and `position_ids`. A
    mask or positions of one row stand for all rows of `input_ids`. `context` is the model's number of positions. Raises
    BadRequest naming the tensor, also for another name.
    """
    for name in inputs:
        if name not in _INPUTS:
            raise BadRequest(f"input_tensors has an unknown tensor {name!r}", param=f"input_tensors.{name}")
    if "input_ids" not in inputs:
        raise BadRequest("input_tensors.input_ids is missing", param="input_tensors.input_ids")
    ids = _integers(inputs, "input_ids", context)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise BadRequest(
            f"input_ids: token id {wrong[0]} is not in 0..{vocab_size - 1}", param="input_tensors.input_ids"
        )
    rows = ids.shape[0]
    return Inputs(ids, *(_for_rows(inputs, name, context, rows) for name in _INPUTS[1:]))


def read_steps(
    inputs: Inputs,
    sessions: Sequence[Session],
    *,
    session_id: str | None,
    step: int,
    logits: Literal["last", "all"],
    kv: str = "",
) -> list[TensorStep]:
    """Returns the step of each row of `inputs`, given the row's session as it is now.

    `sessions` has one for each row: `Session()` for a session that does not exist, and for a step without a session,
    whose `session_id` is None and whose `step` is 1. `kv` identifies the KV that the step brings and asks for. `logits`
    and `kv` are part of the fingerprint, so that a step that differs in one of them is no repetition.

    Raises BadRequest naming the tensor for a mask or positions that do not fit the ids and the session. Raises
    Conflict, naming the expected step, for a step that is neither the next one nor a repetition of the last.
    """
    size, rows = int(inputs.ids.shape[1]), inputs.rows
    masks: list[Ints | None] = [None] * rows if inputs.mask is None else list(inputs.mask)
    kept = [_without_padding(size, mask) for mask in masks]
    new = [tuple(ids[keep].tolist()) for ids, keep in zip(inputs.ids, kept, strict=True)]
    steps: list[TensorStep] = []
    for row, session in enumerate(sessions):
        fingerprint = _fingerprint(new, row, logits + kv)
        if step == session.step and step > 0 and fingerprint == session.fingerprint:
            prior = session.tokens[: len(session.tokens) - len(new[row])]
        elif step == session.step + 1:
            prior = session.tokens
        else:
            raise wrong_step(session_id or "", step, session.step + 1)
        _check_mask(masks[row], size, len(prior))
        _check_positions(None if inputs.positions is None else inputs.positions[row], kept[row], size, len(prior))
        part = None
        if session_id is not None:
            part = SessionStep(
                session=row_session(session_id, row, rows),
                step=step,
                fingerprint=fingerprint,
                length=len(prior),
                tokens=np.array(new[row], dtype="<u4").tobytes(),
            )
        column = int(np.flatnonzero(kept[row])[0])
        steps.append(TensorStep(tokens=prior + new[row], prior=len(prior), step=step, session=part, column=column))
    return steps


def _integers(inputs: Mapping[str, Any], name: str, context: int) -> Ints:
    """Decodes a tensor of integers [rows, n] as int64. Raises BadRequest.

    A mask may cover earlier steps and padding, so n is bounded by two contexts.
    """
    param = f"input_tensors.{name}"
    array = decode_tensor(inputs[name], param=param, max_elements=2 * context * MAX_CHOICES)
    if array.dtype.kind not in "iub":
        raise BadRequest(f"{param} must hold integers, not {array.dtype.name}", param=param)
    if array.ndim != 2 or array.size == 0 or array.shape[0] > MAX_CHOICES or array.shape[1] > 2 * context:
        limit = f"at most {MAX_CHOICES} rows of {2 * context}"
        raise BadRequest(f"{param} must have shape [rows, n], {limit}, not {list(array.shape)}", param=param)
    return array.astype(np.int64)


def _for_rows(inputs: Mapping[str, Any], name: str, context: int, rows: int) -> Ints | None:
    """The mask or positions as a tensor of `rows` rows; None if it was not sent. Raises BadRequest."""
    if name not in inputs:
        return None
    array = _integers(inputs, name, context)
    if array.shape[0] not in (1, rows):
        param = f"input_tensors.{name}"
        raise BadRequest(f"{param} has {array.shape[0]} rows, input_ids has {rows}", param=param)
    return np.broadcast_to(array, (rows, array.shape[1]))


def _without_padding(size: int, mask: Ints | None) -> NDArray[np.bool_]:
    """For each of the `size` ids True for a token, False for padding at either end. Raises BadRequest."""
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
    """Raises BadRequest unless the mask covers the new ids alone, or the session's `prior` tokens (and padding) too."""
    if mask is None or mask.size == size:
        return
    if int(mask[: mask.size - size].sum()) != prior:
        raise BadRequest(
            f"attention_mask must cover the {size} input_ids, or the session's {prior} tokens (as many ones) and them",
            param="input_tensors.attention_mask",
        )


def _check_positions(positions: Ints | None, kept: NDArray[np.bool_], size: int, prior: int) -> None:
    """Raises BadRequest unless the positions of the new tokens count up from `prior`."""
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


def _fingerprint(new: Sequence[tuple[int, ...]], row: int, asked: str) -> str:
    """SHA-256 of one row's step, in hex: of the new tokens of all rows, the row's number, and `asked`."""
    whole = hashlib.sha256(asked.encode())
    if len(new) > 1:
        whole.update(f"{row} of {[len(tokens) for tokens in new]}".encode())
    for tokens in new:
        whole.update(np.array(tokens, dtype="<u4").tobytes())
    return whole.hexdigest()
