"""Buckets of decode steps: which one a batch gets, and how it is filled up."""

import pytest

from blockrelay_worker.execution.batch import Segment
from blockrelay_worker.execution.onnx.compiled.buckets import Bucket, all_buckets, bucket_for, filled


def rows_at(*positions: int) -> list[Segment]:
    return [Segment(rows=1, first_position=position, pages=range(position // 16 + 1)) for position in positions]


@pytest.mark.parametrize(
    ("positions", "bucket"),
    [
        ((0,), Bucket(8, 1)),
        ((127,), Bucket(8, 1)),
        ((128,), Bucket(16, 1)),
        ((5, 1023, 7), Bucket(64, 4)),
        ((1024, 3), Bucket(128, 2)),
        ((0,) * 9, Bucket(8, 16)),
        ((0,) * 33, Bucket(8, 48)),
        ((0,) * 64, Bucket(8, 64)),
    ],
)
def test_a_step_gets_the_least_shape_that_takes_it(positions: tuple[int, ...], bucket: Bucket) -> None:
    assert bucket_for(rows_at(*positions), max_cells=1 << 20) == bucket


@pytest.mark.parametrize(
    "segments",
    [
        [],
        rows_at(*[0] * 65),
        [*rows_at(3), Segment(rows=2, first_position=0, pages=(0,))],
        rows_at(0, 0, 128),
    ],
)
def test_a_step_that_fits_none_has_none(segments: list[Segment]) -> None:
    """No rows, too many, a prompt among them, a table that is too large."""
    assert bucket_for(segments, max_cells=63 if len(segments) == 3 else 1 << 20) is None


def test_what_is_added_is_on_a_page_of_its_own() -> None:
    segments = rows_at(20, 3, 40)
    found = filled(segments, Bucket(8, 8), spare_page=99)
    assert found[:3] == segments and found[3:] == [Segment(rows=1, first_position=0, pages=(99,))] * 5


def test_all_shapes_are_those_that_steps_come_in() -> None:
    most_pages, most_cells = 20, 512
    shapes = all_buckets(max_pages=most_pages, max_cells=most_cells)
    met = {
        bucket_for(rows_at(*[16 * pages - 1] * count), max_cells=most_cells)
        for pages in range(1, most_pages + 1)
        for count in range(1, 66)
    }
    assert set(shapes) == met - {None} and shapes == sorted(shapes)
    assert Bucket(32, 16) in shapes and Bucket(32, 24) not in shapes
