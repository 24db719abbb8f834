"""The layout of logits in an answer, and its size with padding."""

from blockrelay_gateway.api.infer.layout import layout_of
from blockrelay_gateway.api.infer.tensor_steps import TensorStep


def step(new: int, column: int = 0) -> TensorStep:
    return TensorStep(tokens=(5,) * (new + 2), prior=2, step=1, session=None, column=column)


def test_each_row_stands_where_its_tokens_stood() -> None:
    layout = layout_of([step(3, column=4), step(5, column=2)], rows=2)
    assert layout.places == ((2, 5), (0, 5)) and layout.width == 5, "columns that all rows leave out are left out"
    assert layout.tokens == 8


def test_the_last_tokens_alone_have_one_column() -> None:
    assert layout_of(None, rows=3).places == ((0, 1),) * 3


def test_padding_counts() -> None:
    layout = layout_of([step(100), *[step(1)] * 15], rows=16)
    assert layout.width * len(layout.places) == 1600 and layout.tokens == 115
