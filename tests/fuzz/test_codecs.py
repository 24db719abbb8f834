"""No bytes make a reader of ours do anything but decode or refuse. A million and more: `make fuzz`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay.errors import WireError
from tests.support.fuzz_targets import TARGETS, Target, attempt

kinds = st.sampled_from(["set", "insert", "delete", "cut"])
edits = st.lists(st.tuples(kinds, st.integers(0, 2**20), st.binary(max_size=4)), max_size=6)


@pytest.mark.parametrize("name", TARGETS)
def test_every_seed_decodes(name: str) -> None:
    for seed in TARGETS[name].seeds:
        assert attempt(name, seed)


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
def test_changed_messages_decode_or_are_refused(name: str, data: st.DataObject) -> None:
    changed = bytearray(data.draw(st.sampled_from(TARGETS[name].seeds)))
    for kind, place, new in data.draw(edits):
        at = place % (len(changed) + 1)
        match kind:
            case "set":
                changed[at : at + len(new)] = new
            case "insert":
                changed[at:at] = new
            case "delete":
                del changed[at : at + 1 + len(new)]
            case _:
                del changed[at:]
    attempt(name, bytes(changed))


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.binary(max_size=100))
def test_any_bytes_decode_or_are_refused(name: str, data: bytes) -> None:
    attempt(name, data)


def test_what_a_target_must_not_raise_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above and the campaign could not fail otherwise."""
    careless = Target(lambda data: {}[data], (WireError,), (b"x",))
    monkeypatch.setitem(TARGETS, "message", careless)
    with pytest.raises(KeyError):
        attempt("message", b"x")
