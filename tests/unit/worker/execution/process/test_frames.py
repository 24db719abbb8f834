"""Messages between a worker and the process of its device."""

import io

import numpy as np
import pytest

from blockrelay_worker.execution.process.frames import Message, PipeClosed, read, write

MESSAGE = Message(
    "run",
    {"segments": [[3, 0, [5, 1]]], "seconds": {"block_1": 0.25}, "none": None},
    [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 4), np.float16), np.array(7, np.int32)],
)


def written(*messages: Message) -> bytes:
    stream = io.BytesIO()
    for message in messages:
        write(stream, message)
    return stream.getvalue()


def test_a_message_comes_as_it_was_sent_and_the_next_behind_it() -> None:
    stream = io.BytesIO(written(MESSAGE, Message("done")))
    found = read(stream)
    assert (found.kind, found.fields) == ("run", MESSAGE.fields)
    for came, sent in zip(found.arrays, MESSAGE.arrays, strict=True):
        assert (came.dtype, came.shape, came.tobytes()) == (sent.dtype, sent.shape, sent.tobytes())
    assert read(stream) == Message("done", {}, [])


def test_arrays_may_be_views_and_what_comes_may_be_written() -> None:
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    (found,) = read(io.BytesIO(written(Message("rows", arrays=[turned])))).arrays
    np.testing.assert_array_equal(found, turned)
    found[...] = 0


def test_a_pipe_that_ends_anywhere_says_so() -> None:
    whole = written(MESSAGE)
    for size in range(len(whole)):
        with pytest.raises(PipeClosed):
            read(io.BytesIO(whole[:size]))


def test_a_length_that_is_none_ends_it_too() -> None:
    with pytest.raises(PipeClosed):
        read(io.BytesIO(b"\xff" * 64))
