"""Why a request is refused, in one word of a closed list: what panels show by route."""

from collections.abc import Iterator

from blockrelay.errors import BlockrelayError, LimitExceeded, RedisFull
from blockrelay.observability.metrics.gateway import LIMITS, REFUSALS
from blockrelay_gateway.http.errors import reason_of


def kinds(of: type[BlockrelayError] = BlockrelayError) -> Iterator[type[BlockrelayError]]:
    yield of
    for kind in of.__subclasses__():
        yield from kinds(kind)


def test_every_kind_of_error_has_a_reason_whose_series_is_there_from_the_start() -> None:
    for kind in set(kinds()) - {LimitExceeded}:
        error = kind.__new__(kind)
        assert reason_of(error) in REFUSALS, kind


def test_a_limit_is_called_by_its_name() -> None:
    for limit in LIMITS:
        assert reason_of(LimitExceeded("full", scope="cell", limit=limit)) == limit and limit in REFUSALS
    assert reason_of(RedisFull.__new__(RedisFull)) == "redis_memory"
