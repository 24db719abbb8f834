"""How one request is submitted: the table of states as a pure function, over all histories."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay_gateway.admission.submission_states import TABLE, Effect, Event, State, answered, step

ANSWERS = (Event.OK, Event.EXISTS, Event.REPEAT)
FAILURES = (Event.REFUSED, Event.LOST)
LIVE = (State.ACCEPTED, State.FOUND)


def run(keyed: bool, answer: Event, withdrawn: bool) -> tuple[State, list[Effect]]:
    """One request from its submission to its end state, all effects done."""
    state, done = (State.NEW_KEYED if keyed else State.NEW), list[Effect]()
    events = [Event.SUBMIT, answer]
    if withdrawn and answer in ANSWERS:
        events.append(Event.WITHDRAW)
    for event in events:
        effects, state = step(state, event)
        done += effects
    return state, done


HISTORIES = st.tuples(st.booleans(), st.sampled_from((*ANSWERS, *FAILURES)), st.booleans())


@given(HISTORIES)
def test_it_is_read_if_and_only_if_it_was_accepted_or_found(history: tuple[bool, Event, bool]) -> None:
    _, answer, withdrawn = history
    state, _ = run(*history)
    assert (state in LIVE) == (answer in ANSWERS and not withdrawn)
    assert state in (*LIVE, State.GONE)


@given(HISTORIES)
def test_nothing_that_is_gone_is_still_followed(history: tuple[bool, Event, bool]) -> None:
    """FOLLOW, JOIN and RESUME follow it; DROP and RELEASE end that."""
    state, done = run(*history)
    count = Counter(done)
    begun = count[Effect.FOLLOW] + count[Effect.JOIN] + count[Effect.RESUME]
    ended = count[Effect.DROP] + count[Effect.RELEASE]
    assert begun - ended == (1 if state in LIVE else 0)


@given(HISTORIES)
def test_only_a_new_request_is_announced_and_once(history: tuple[bool, Event, bool]) -> None:
    keyed, answer, _ = history
    new = answer is Event.OK or (answer is Event.EXISTS and not keyed)
    assert run(*history)[1].count(Effect.ANNOUNCE) == int(new)


@given(HISTORIES)
def test_what_redis_may_have_of_a_refused_request_is_taken_back(history: tuple[bool, Event, bool]) -> None:
    """A request with a random id is taken back; of a keyed one only this gateway's reader, for it may have others."""
    keyed, answer, withdrawn = history
    _, done = run(*history)
    ours = answer is Event.OK or (answer is Event.EXISTS and not keyed)
    assert (Effect.TAKE_BACK in done) == ((ours and withdrawn) or (answer is Event.LOST and not keyed))
    assert (Effect.LEAVE in done) == (keyed and answer in FAILURES)


@pytest.mark.parametrize("keyed", [False, True])
def test_an_effect_that_fails_can_still_be_undone(keyed: bool) -> None:
    """The state is that of before the answer, so both failures are in the table there."""
    _, state = step(State.NEW_KEYED if keyed else State.NEW, Event.SUBMIT)
    for failure in FAILURES:
        assert step(state, failure).state is State.GONE


def test_a_keyed_request_is_followed_only_after_accept() -> None:
    effects, _ = step(State.NEW_KEYED, Event.SUBMIT)
    assert Effect.FOLLOW not in effects
    effects, _ = step(State.NEW, Event.SUBMIT)
    assert Effect.FOLLOW in effects, "so that no entry has to wait for a second read"


def test_gone_is_the_end_and_every_other_state_can_get_there() -> None:
    assert not [state for state, _ in TABLE if state is State.GONE]
    under_way = {State.FOLLOWED, State.SOUGHT, *LIVE}
    assert {state for (state, _), done in TABLE.items() if done.state is State.GONE} == under_way


@pytest.mark.parametrize("status", ["BUSY", "OTHER", "STEP", "TOO_LARGE", "NOT_EXACT"])
def test_every_other_answer_is_a_refusal(status: str) -> None:
    assert answered(status) is Event.REFUSED
    assert [answered(name) for name in ("OK", "EXISTS", "REPEAT")] == list(ANSWERS)
