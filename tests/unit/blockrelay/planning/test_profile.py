"""The file of a profile: decoding returns what was encoded, both forms are read, and nonsense is refused."""

import json
from typing import Any

import pytest

from blockrelay.errors import UsageError
from blockrelay.planning.profile import BlockProfile, Hop, ProductTimes, Profile, StepOverhead, decode_profile

FULL = Profile(
    model="storyteller",
    model_hash="02ff",
    machine="a CPU, 2 threads",
    measured="2026-11-22T06:00:00Z",
    blocks={
        "block_1": {
            "CPU": BlockProfile(
                seconds={1: 0.0021, 16: 0.0043, 256: 0.051},
                spread={1: 0.03, 16: 0.02, 256: 0.0},
                seconds_at_context={2048: {1: 0.0029, 16: 0.0071}},
                spread_at_context={2048: {1: 0.01, 16: 0.02}},
                load_seconds=0.4,
                load_spread=0.1,
                bytes=41943040,
                kv_bytes_per_token=4096,
            ),
            "GPU": BlockProfile(seconds={1: 0.001}),
        }
    },
    products={"CPU": {"w4a8": ProductTimes(layer={1: 0.001, 16: 0.003}, head={1: 0.002}, spread={1: 0.05})}},
    hop={"shared_memory": Hop(seconds=0.00008, seconds_per_byte=2e-10, spread=0.07)},
    step=StepOverhead(seconds=1e-4, seconds_per_row=1e-5, spread=0.02),
)


def test_what_is_written_is_read_again() -> None:
    assert decode_profile(FULL.encode().encode(), "p.json") == FULL


def test_the_short_form_is_seconds_of_one_row() -> None:
    found = decode_profile(b'{"block_1": {"CPU": 0.245, "GPU": 0.11}, "block_2": {"CPU": 0.2}}', "p.json")
    assert found.blocks["block_1"]["GPU"] == BlockProfile(seconds={1: 0.11})
    assert found.classes == ("CPU",), "nobody measured block_2 on a GPU"


def changed(*path: str, to: object) -> bytes:
    content: Any = json.loads(FULL.encode())
    place = content
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = to
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[]", "p.json: expected an object"),
        (b"{", "p.json: not JSON"),
        (b"{}", "p.json: no block was measured"),
        (b'{"block_1": {}}', "p.json: block_1: no device was measured"),
        (b'{"block_1": {"CPU": 0}}', "block_1: CPU must be seconds, above 0"),
        (b'{"block_1": {"CPU": true}}', "block_1: CPU must be seconds, above 0"),
        (b'{"block_1": {"CPU": NaN}}', "block_1: CPU must be seconds, above 0"),
        (changed("blocks", "block_1", "CPU", "seconds", to={}), "CPU: seconds: nothing was measured"),
        (changed("blocks", "block_1", "CPU", "seconds", to={"0": 1}), "seconds: '0' must be a whole number above 0"),
        (changed("blocks", "block_1", "CPU", "seconds", to={"1": -1}), "seconds: 1 must be above 0, not -1"),
        (changed("blocks", "block_1", "CPU", "secnds", to={}), "CPU: unknown field 'secnds'"),
        (changed("products", "CPU", "w4a8", "head", to={}), "products: CPU: w4a8: nothing was measured"),
        (changed("products", "CPU", "w4a8", "tail", to={}), "w4a8: unknown field 'tail'"),
        (changed("hop", "redis", to={"seconds": 1}), "hop: redis: field 'seconds_per_byte' is missing"),
        (changed("step", "sprad", to=1), "step: unknown field 'sprad'"),
        (changed("modle", to="x"), "unknown field 'modle'"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(content: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        decode_profile(content, "p.json")


class TestInterpolation:
    times = BlockProfile(seconds={1: 1.0, 4: 4.0, 16: 10.0}, seconds_at_context={1128: {1: 2.0, 16: 40.0}})

    @pytest.mark.parametrize(
        ("rows", "seconds"), [(1, 1.0), (2.5, 2.5), (4, 4.0), (10, 7.0), (16, 10.0), (28, 16.0), (0.5, 1.0)]
    )
    def test_straight_lines_between_rows_and_beyond(self, rows: float, seconds: float) -> None:
        assert self.times.at(rows, 128) == pytest.approx(seconds)

    @pytest.mark.parametrize(
        ("rows", "context", "seconds"), [(1, 628, 1.5), (16, 1128, 40.0), (16, 628, 25.0), (1, 2128, 3.0)]
    )
    def test_and_between_contexts(self, rows: int, context: int, seconds: float) -> None:
        assert self.times.at(rows, context) == pytest.approx(seconds)

    def test_rows_that_were_not_measured_there_grow_as_their_neighbours_do(self) -> None:
        # At 1128 tokens one row takes twice as long, sixteen take four times: 8.5 rows, half way, three times.
        assert self.times.at(8.5, 1128) == pytest.approx(3 * self.times.at(8.5, 128))

    def test_where_no_other_context_was_measured_it_costs_nothing(self) -> None:
        assert BlockProfile(seconds={1: 1.0}).at(5, 100_000) == 1.0
