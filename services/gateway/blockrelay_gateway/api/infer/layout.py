"""The layout of a tensor step's logits in the one tensor of its answer, and the answer's size. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.api.infer.session_kv import ServedKv, fields_of
from blockrelay_gateway.api.infer.tensor_steps import TensorStep


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The columns of logits in the answer's tensor, whose rows all have `width` columns."""

    places: tuple[tuple[int, int], ...]
    """For each row the first column with logits, and the column behind the last one."""
    width: int

    @property
    def tokens(self) -> int:
        """Number of positions with logits in all rows, without padding."""
        return sum(end - begin for begin, end in self.places)


def layout_of(steps: Sequence[TensorStep] | None, *, rows: int) -> TensorLayout:
    """Lays out the logits of all new tokens of `steps`, or without `steps` those of the last token of each of `rows`.

    There is at least one step if `steps` is given. A token's logits stand in the token's column of `input_ids`; columns
    in which no row has a token are left out.
    """
    if steps is None:
        return TensorLayout(((0, 1),) * rows, 1)
    first = min(step.column for step in steps)
    places = tuple((step.column - first, step.column - first + step.new) for step in steps)
    return TensorLayout(places, max(end for _, end in places))


def answer_bytes(layout: TensorLayout, vocab: int, kv: ServedKv, rows: Sequence[AdmissionRequest]) -> int:
    """Bytes of the answer in memory: its logits as float16, and the KV that the rows ask for."""
    pages = sum(len(fields_of(row.body.kv_asked, int(row.body.prompt.size))) for row in rows)
    return len(layout.places) * layout.width * vocab * 2 + pages * 2 * kv.shape.half_bytes
