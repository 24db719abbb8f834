"""Which rows go into a batch: tables of data and what holds for all of them."""

from hypothesis import given
from hypothesis import strategies as st

from blockrelay_worker.scheduling.batch_policy import Arrived, Candidate, choose_arrived, choose_tokens


def test_decode_rows_come_first_and_prompts_share_the_rest() -> None:
    candidates = [Candidate("prompt", 100), Candidate("a", 1, last_step=5), Candidate("b", 1, last_step=3)]
    assert choose_tokens(candidates, 16) == [("b", 1), ("a", 1), ("prompt", 14)]


def test_the_prompt_that_waited_longest_is_served_first() -> None:
    candidates = [Candidate("young", 30, last_step=2), Candidate("old", 30, last_step=1)]
    assert choose_tokens(candidates, 40) == [("old", 30), ("young", 10)]


def test_a_quarantined_request_runs_alone_in_its_turn() -> None:
    candidates = [Candidate("a", 1, last_step=4), Candidate("s", 1, quarantined=True, last_step=3)]
    assert choose_tokens(candidates, 16) == [("s", 1)]
    later = [Candidate("a", 1, last_step=4), Candidate("s", 1, quarantined=True, last_step=5)]
    assert choose_tokens(later, 16) == [("a", 1)]


def test_a_quarantined_prompt_is_cut_as_others_are() -> None:
    quarantined = [Candidate("s", 500, quarantined=True)]
    assert choose_tokens(quarantined, 512, prompt_tokens=64) == [("s", 64)]


def test_prompts_that_arrive_together_wait_for_each_other_where_they_take_too_long() -> None:
    waiting = [Arrived("a", 64, decodes=False), Arrived("b", 64, decodes=False), Arrived("c", 64, decodes=False)]
    assert choose_arrived(waiting, 512, 32) == [0, 1, 2]
    assert choose_arrived(waiting, 512, 32, tokens_alone=128) == [0, 1]
    assert choose_arrived(waiting, 512, 32, tokens_alone=32) == [0], "a segment is not cut"


candidate_lists = st.lists(
    st.builds(Candidate, st.uuids().map(str), st.integers(1, 600), st.booleans(), st.integers(0, 50)),
    max_size=40,
    unique_by=lambda c: c.request_id,
)


@given(candidate_lists, st.integers(1, 512))
def test_a_batch_is_bounded_ragged_and_never_empty_while_somebody_waits(candidates: list[Candidate], room: int) -> None:
    chosen = choose_tokens(candidates, room)
    by_name = {c.request_id: c for c in candidates}
    assert sum(rows for _, rows in chosen) <= room
    assert len({request_id for request_id, _ in chosen}) == len(chosen)
    assert all(1 <= rows <= by_name[request_id].missing for request_id, rows in chosen)
    assert bool(chosen) == bool(candidates)
    if any(by_name[request_id].quarantined for request_id, _ in chosen):
        assert len(chosen) == 1


@given(candidate_lists, st.integers(1, 64))
def test_everybody_is_served_at_last(candidates: list[Candidate], room: int) -> None:
    iteration = 51
    left = {c.request_id: c for c in candidates}
    for _ in range(sum(c.missing for c in candidates) + 1):
        if not left:
            break
        for request_id, rows in choose_tokens(list(left.values()), room):
            old = left.pop(request_id)
            if old.missing > rows:
                left[request_id] = Candidate(request_id, old.missing - rows, old.quarantined, iteration)
        iteration += 1
    assert not left


def test_prompt_rows_have_a_bound_of_their_own() -> None:
    prompt = Candidate("prompt", 500)
    assert choose_tokens([prompt, Candidate("a", 1)], 512, prompt_tokens=64) == [("a", 1), ("prompt", 64)]
    assert choose_tokens([prompt, Candidate("a", 1)], 512, max_decoding=0, prompt_tokens=64) == [("prompt", 64)]


def test_decode_rows_of_one_group_are_those_that_waited_longest() -> None:
    candidates = [Candidate("a", 1, last_step=3), Candidate("b", 1, last_step=1), Candidate("c", 1, last_step=2)]
    assert choose_tokens(candidates, 512, max_decoding=2) == [("b", 1), ("c", 1)]


def test_decoding_segments_overtake_prompt_chunks_but_never_their_own() -> None:
    waiting = [
        Arrived("long", 128, False),
        Arrived("long", 128, False),
        Arrived("a", 1, True),
        Arrived("long", 1, True),
        Arrived("b", 3, True),
    ]
    assert choose_arrived(waiting, 512, prompt_tokens=256) == [2, 4, 0]
    assert choose_arrived(waiting, 512, prompt_tokens=32) == [2, 4, 0], "a segment is not cut"
    assert choose_arrived(waiting, 100, prompt_tokens=32) == [2, 4]
    assert choose_arrived(waiting[:2], 100, prompt_tokens=32) == [0]


def test_prompt_chunks_share_a_step_without_decoding_up_to_the_batch() -> None:
    waiting = [Arrived("a", 128, False), Arrived("b", 128, False), Arrived("c", 300, False)]
    assert choose_arrived(waiting, 512, prompt_tokens=32) == [0, 1]


@given(
    st.lists(st.builds(Arrived, st.sampled_from("abcdef"), st.integers(1, 300), st.booleans()), max_size=20),
    st.integers(1, 512),
    st.integers(1, 512),
)
def test_arrived_segments_are_all_served_in_each_requests_order(
    waiting: list[Arrived], max_rows: int, prompt_tokens: int
) -> None:
    left = list(enumerate(waiting))
    served: list[int] = []
    while left:
        chosen = choose_arrived([s for _, s in left], max_rows, prompt_tokens)
        batch = [left[i] for i in chosen]
        assert batch, "never nothing"
        assert len({s.request_id for _, s in batch}) == len(batch)
        assert sum(s.rows for _, s in batch) <= max_rows or len(batch) == 1
        served += [i for i, _ in batch]
        left = [item for i, item in enumerate(left) if i not in chosen]
    for name in "abcdef":
        order = [i for i in served if waiting[i].request_id == name]
        assert order == sorted(order)


@given(candidate_lists, st.integers(1, 64), st.integers(1, 8), st.booleans())
def test_everybody_is_served_at_last_within_an_executors_limits(
    candidates: list[Candidate], max_rows: int, max_sequences: int, ragged: bool
) -> None:
    """Also beside requests that decode for ever."""
    iteration = 51
    left = {c.request_id: c for c in candidates}
    endless = {f"endless-{i}" for i in range(10)}
    left |= {name: Candidate(name, 1) for name in endless}
    for _ in range(20 * sum(c.missing for c in candidates) + 20):
        if left.keys() == endless:
            break
        chosen = choose_tokens(list(left.values()), max_rows, max_sequences=max_sequences, ragged=ragged)
        assert 0 < len(chosen) <= max_sequences and 0 < sum(rows for _, rows in chosen) <= max_rows
        assert ragged or len({rows for _, rows in chosen}) == 1
        for request_id, rows in chosen:
            old = left.pop(request_id)
            missing = 1 if request_id in endless else old.missing - rows
            if missing:
                left[request_id] = Candidate(request_id, missing, old.quarantined, iteration)
        iteration += 1
    assert left.keys() == endless


arrived_lists = st.lists(
    st.builds(Arrived, st.sampled_from("abcdefgh"), st.integers(1, 40), st.booleans()), min_size=1, max_size=20
)


@given(arrived_lists, st.integers(1, 64), st.integers(1, 5), st.booleans())
def test_what_arrived_is_taken_within_an_executors_limits(
    waiting: list[Arrived], max_rows: int, max_sequences: int, ragged: bool
) -> None:
    taken = 0
    while waiting:
        chosen = choose_arrived(waiting, max_rows, 16, max_sequences=max_sequences, ragged=ragged)
        assert 0 < len(chosen) <= max_sequences and len({waiting[i].request_id for i in chosen}) == len(chosen)
        assert len(chosen) == 1 or sum(waiting[i].rows for i in chosen) <= max_rows
        assert ragged or len({waiting[i].rows for i in chosen}) == 1
        waiting = [segment for i, segment in enumerate(waiting) if i not in chosen]
        taken += 1
        assert taken <= 20


def test_a_prompt_that_has_waited_longest_gets_a_place_among_decoding_requests() -> None:
    decoding = [Candidate(f"d{i}", 1, last_step=7) for i in range(4)]
    prompt = Candidate("prompt", 50, last_step=3)
    assert choose_tokens([*decoding, prompt], 64, max_sequences=2) == [("d0", 1), ("prompt", 50)]
    assert choose_tokens([*decoding, prompt], 64, max_sequences=1) == [("prompt", 50)]
