"""What a failover takes back of what clients were told, line by line of the table in docs/guarantees.md.

What must hold is in the configuration "failovers" (I14), and that WAIT is needed for it in `test_rules`. Here is what
no WAIT holds: the model must go on to find it, so that the documents do not promise it.
"""

from dataclasses import replace

import pytest

from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import Budget, State
from tests.protocol_model.explorer import Counterexample, explore
from tests.protocol_model.protocol import Protocol

#: A CPU, and a GPU that may have another first token.
MIXED = Bounds(
    stages=1, workers=2, clients=1, gateways=1, replicas=True, ids=(0, 1), prompt=1, tokens=1, handover=True,
    pages_leave=False, varying=frozenset({1}), gpus=frozenset({1}),
)  # fmt: skip
ONE = Bounds(stages=1, workers=1, clients=1, gateways=1, replicas=True, ends_when_done=False)
TWO_IDS = replace(ONE, workers=2, ids=(0, 1), prompt=1, ends_when_done=True)


class OtherEnds(Protocol):
    """Broken too where a client was told another end than the one that Redis has."""

    def broken(self, state: State) -> str | None:
        for client in state.clients:
            record = state.redis.requests[client.request]
            if client.ended and record is not None and record.ends and record.ends != (client.ended,):
                return f"told {client.ended}, and it is {record.ends[0]}"
        return super().broken(state)


def found(protocol: type[Protocol], bounds: Bounds, **faults: int) -> Counterexample[State] | None:
    return explore(protocol(replace(bounds, faults=Budget(**faults))), most_states=100_000).counterexample


def test_an_acceptance_that_does_not_wait_is_gone_with_its_gateway() -> None:
    background = replace(ONE, background=True, clients_return=False, ends_when_done=True)
    assert found(Protocol, background, failover=1, gateway_kill=1) is None
    lost = found(Protocol, replace(background, replicas=False), failover=1, gateway_kill=1)
    assert lost is not None and lost.kind == "hangs", str(lost)


def test_an_end_that_was_delivered_comes_again() -> None:
    """COMMIT does not wait: the same tokens are computed again."""
    assert found(OtherEnds, ONE, failover=1) is None


def test_a_deadline_may_pass_before_it_has_come_again() -> None:
    other = found(OtherEnds, ONE, failover=1, deadline=1)
    assert other is not None and other.what == "told length, and it is expired", str(other)
    assert found(OtherEnds, ONE, deadline=1) is None, "it takes a failover"


def test_a_stream_may_have_told_of_a_cancellation_that_was_not_answered() -> None:
    """DELETE gets 503: the replicas do not have it. The stream brings the end at once."""
    other = found(OtherEnds, ONE, failover=1, cancel=1)
    assert other is not None and other.what == "told cancelled, and it is length", str(other)
    assert other.state.cancelled == (), "nobody was told that it is cancelled but those who read"


@pytest.mark.model
def test_tokens_that_were_shown_are_computed_again_by_anybody() -> None:
    """Where workers of two numerics ids serve, by the others too: what is lost with the log is who began it."""
    for loss in ("failover", "restart"):
        other = found(Protocol, TWO_IDS, **{loss: 1})
        assert other is not None and other.what.startswith("I8: client 0 has tokens of (0,)"), str(other)
    assert found(Protocol, TWO_IDS, kill=1, retire=1) is None, "it takes a loss"
    assert found(Protocol, replace(TWO_IDS, ids=()), failover=1) is None, "and two numerics ids"


class OneTokenForEver(Protocol):
    """Broken too where a token that CPUs alone had computed, and a client has seen, becomes another one."""

    def broken(self, state: State) -> str | None:
        for client in state.clients:
            record = state.redis.requests[client.request]
            known = () if record is None else record.log
            if any(seen != there for seen, there in zip(client.seen, known, strict=False)):
                return f"seen {client.seen}, and the log is {known}"
        return super().broken(state)


@pytest.mark.model
def test_tokens_of_a_cpu_are_computed_again_by_a_gpu() -> None:
    """They are shown at once: a CPU would come to the same. It takes a request that CPUs had while no GPU was there."""
    other = found(OneTokenForEver, MIXED, failover=1, drain=1)
    assert other is not None and other.what == "seen (1,), and the log is (101,)", str(other)
    assert found(OneTokenForEver, MIXED, failover=1) is None, "while the GPU is there, it has the request"
