"""The table of a check."""

from dataclasses import replace

from blockrelay.onnx_blocks.reports.checking import CheckedBlock, CheckedTensor, StepSeconds, step_seconds
from blockrelay_launcher.onnx_blocks.check_table import table

GOOD = CheckedBlock(
    block="block_1",
    file="block_1.onnx",
    seconds=0.5,
    outputs=(
        CheckedTensor("hidden", "float16", ("batch", 1, 64), "float16", (5, 1, 64)),
        CheckedTensor("number", "int64", None, "int64", ()),
    ),
)
BAD = CheckedBlock(
    block="block_2",
    file="block_2.onnx",
    problem="it says why",
    outputs=(CheckedTensor("logits", "float16", ("batch", ""), "float32", (5,)),),
)


def rows(text: str) -> list[list[str]]:
    """The cells of each line, which two spaces or more part."""
    return [[cell for cell in line.split("  ") if cell] for line in text.splitlines()]


def test_a_line_for_each_output_and_the_result_beside_the_first() -> None:
    text = table([GOOD, BAD])
    assert [[cell.strip() for cell in row] for row in rows(text)] == [
        ["BLOCK", "OUTPUT", "DECLARED", "ACTUAL", "DTYPE", "SECONDS", "RESULT"],
        ["block_1", "hidden", "(batch, 1, 64)", "(5, 1, 64)", "float16", "0.5000", "passed"],
        ["number", "any", "()", "int64"],
        ["block_2", "logits", "(batch, ?)", "(5,)", "float16, is float32", "it says why"],
    ]
    assert text.splitlines()[2].startswith(" " * len("block_1"))


def test_a_step_is_all_blocks_once() -> None:
    blocks = [replace(GOOD, load_seconds=1.5), replace(GOOD, seconds=0.25, load_seconds=2)]
    assert step_seconds(blocks) == StepSeconds(0.75, 4.25)
    assert step_seconds([*blocks, BAD]) is None, "one has not run"


def test_a_device_says_what_the_cpu_computed_for_it() -> None:
    head, one, _ = table([replace(GOOD, nodes=90, nodes_on_cpu=12)]).splitlines()
    assert "ON CPU" in head and "12 of 90 nodes  passed" in one


def test_a_block_that_could_not_even_be_read_has_a_line() -> None:
    assert table([CheckedBlock(block="block_9", file="f", problem="not run")]).splitlines()[1].split() == [
        "block_9",
        "not",
        "run",
    ]
