"""The allocation of a ring: no message overwrites another one that is still unread."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay.errors import WireError
from blockrelay_worker.transport.local_rows.ring import RingSpace


def test_messages_lie_one_after_the_other_and_at_the_front_again_when_all_is_read() -> None:
    space = RingSpace(100)
    assert [space.take(40), space.take(40)] == [0, 40]
    assert space.take(40) is None, "20 bytes are left behind, none in front"
    space.was_read(1)
    assert space.take(40) == 0, "around the end"
    assert space.take(1) is None, "all of it is taken, or too short"
    space.was_read(3)
    assert space.unread == 0 and space.take(100) == 0 and space.take(1) is None


@given(st.lists(st.one_of(st.integers(1, 60), st.none()), max_size=60), st.integers(1, 64))
def test_what_is_unread_is_never_written_over(steps: list[int | None], size: int) -> None:
    """`None`: the oldest message is read."""
    space, taken, read = RingSpace(size), list[range](), 0
    for step in steps:
        if step is None:
            if taken:
                taken.pop(0)
                read += 1
                space.was_read(read)
            continue
        at = space.take(step)
        if at is None:
            assert taken or step > size, "an empty ring has room for all that fits into it"
            continue
        piece = range(at, at + step)
        assert piece.stop <= size
        assert all(piece.stop <= other.start or other.stop <= piece.start for other in taken)
        taken.append(piece)
        assert space.unread == len(taken)


@pytest.mark.parametrize("count", [0, 4, 2**63])
def test_a_reader_that_counts_wrong_is_not_believed(count: int) -> None:
    space = RingSpace(100)
    for _ in range(3):
        space.take(1)
    space.was_read(1)
    with pytest.raises(WireError):
        space.was_read(count)
