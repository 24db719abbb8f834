"""The counts of executed blocks in answers."""

from typing import Any

from blockrelay.protocol.messages import EndEntry
from blockrelay_gateway.api.infer.responses import execution

META: dict[str, Any] = {
    "execution_times": {"block_1": 0.1, "block_2": 0.1, "block_3": 0.1},
    "gpu_blocks": ["block_1", "block_2"],
}


def counts(*executed: tuple[int, int] | None) -> tuple[int, int]:
    ends = [EndEntry(1, "tensor", META, (), "n", one) for one in executed]
    stats = execution(*ends)["execution_stats"]
    return stats["gpu_blocks_executed"], stats["cpu_blocks_executed"]


def test_blocks_are_counted_in_all_steps() -> None:
    assert counts((40, 26)) == (40, 26)


def test_rows_of_one_body_are_one_step() -> None:
    assert counts((2, 1), (2, 1)) == (2, 1)
    assert counts((2, 1), (0, 3)) == (2, 3), "some rows went to a CPU"


def test_an_end_without_a_step_counts_no_block() -> None:
    assert counts(None) == (0, 0)
