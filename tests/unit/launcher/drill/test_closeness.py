"""What nobody computes twice with the same bits is measured by reference logits of a process of its own."""

import base64
from dataclasses import replace

import numpy as np
import pytest

from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_launcher.drill.clients import RequestRecord
from blockrelay_launcher.drill.closeness import Claim, Closeness, claim_of, computed_by, first_beyond, longest_of
from blockrelay_launcher.drill.workload import DrillRequest, Numerics, References

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, seed=1, ignore_eos=True)
GREEDY = DrillRequest(prompt=(5, 6, 7), params=PARAMS)
DRAWN = DrillRequest(prompt=(5, 6, 7), params=SamplingParams(max_tokens=12, temperature=0.8, seed=1, ignore_eos=True))
SESSION = DrillRequest(prompt=(5, 6, 7, 8), params=PARAMS, cuts=(2, 4))
ASKS = [GREEDY, DRAWN, SESSION]


def seen(ask: int, tokens: list[int], **fields: object) -> RequestRecord:
    one = RequestRecord(
        number=ask, kind="stream", started=0.0, request_id="req-1", tokens=tokens, finish_reason="length"
    )
    for name, value in fields.items():
        setattr(one, name, value)
    return one


def test_greedy_tokens_and_logits_of_sessions_can_be_measured_and_nothing_else() -> None:
    assert claim_of(ASKS, seen(0, [1, 2])) == Claim(0, (1, 2))
    assert claim_of(ASKS, seen(0, [], kind="cancelled")) is None
    assert claim_of(ASKS, seen(1, [1, 2])) is None, "it was drawn at random"
    assert claim_of(ASKS, seen(2, [], kind="session", digests=["x"])) == Claim(2, ("x",))


def test_the_beginning_of_a_longer_claim_is_measured_with_it() -> None:
    long, begins, other = Claim(0, (1, 2, 3)), Claim(0, (1,)), Claim(0, (1, 3))
    of_another, digests = Claim(1, (1, 2)), Claim(2, ("x", "y"))
    found = longest_of([begins, other, long, of_another, digests, begins, Claim(2, ("x",))])
    assert found[begins] in (long, other) and found[Claim(2, ("x",))] == digests
    assert all(found[claim] == claim for claim in (long, other, of_another, digests))


@pytest.mark.parametrize(
    ("fingerprint", "alone"),
    [("c", True), ("c/d", True), ("c+d@17", True), ("c/g", False), ("c+g@3", False), ("g/c+d@3", False), ("", False)],
)
def test_a_fingerprint_tells_whether_a_gpu_had_a_part(fingerprint: str, alone: bool) -> None:
    assert computed_by([fingerprint], {"c", "d"}) is alone


def test_the_first_distance_beyond_the_tolerance_is_told_and_what_is_no_number_is_beyond() -> None:
    assert first_beyond([0.0, 0.02, 0.5, 0.9], 0.02) == (3, 0.5)
    assert first_beyond([0.0, 0.02], 0.02) is None
    found = first_beyond([0.0, float("nan")], 0.02)
    assert found is not None and found[0] == 2


def test_penalties_and_grammars_have_a_part_in_what_is_the_best_token() -> None:
    longer = replace(PARAMS, max_tokens=40)
    penalised = replace(longer, repetition_penalty=2.0, frequency_penalty=2.0)
    follows = replace(longer, grammar='start: "Zz" /[a-z]{2,8}/ "Q"', ignore_eos=False)
    asks = [DrillRequest(prompt=(5, 6, 7), params=params) for params in (longer, penalised, follows)]
    references = References(models=[BUNDLED_MODEL], requests=asks, ids={"own": Numerics()})
    references.prepare((ask, "own") for ask in range(3))
    answers = [answer for ask in range(3) if (answer := references.answer(ask, "own"))]
    records = [seen(ask, list(answer.tokens), finish_reason=answer.finish_reason) for ask, answer in enumerate(answers)]
    plain = [seen(ask, records[0].tokens) for ask in (1, 2)]
    closeness = Closeness(BUNDLED_MODEL, asks, {})
    closeness.prepare([*records, *plain])
    assert [closeness.verdict(one, on_gpu=True).wrong for one in records] == [""] * 3
    assert answers[2].text.startswith("Zz") and answers[2].text.endswith("Q")
    assert all("is behind the best one" in closeness.verdict(one, on_gpu=True).wrong for one in plain)


def test_answers_are_measured_by_a_process_of_its_own() -> None:
    references = References(models=[BUNDLED_MODEL], requests=ASKS, ids={"own": Numerics()})
    references.prepare([(0, "own")])
    answer = references.answer(0, "own")
    assert answer is not None
    right = list(answer.tokens)
    noise = base64.b64encode(np.linspace(-9, 9, 2048).astype("<f2").tobytes()).decode()
    whole, short = seen(0, right), seen(0, right[:-1])
    wrong = seen(0, [*right[:6], right[6] ^ 1, *right[7:]])
    begun = seen(0, right[:4], kind="cancelled", finish_reason="")
    drawn, session = seen(1, right), seen(2, [], kind="session", digests=["noise", "noise"])
    closeness = Closeness(BUNDLED_MODEL, ASKS, {"noise": noise})
    closeness.prepare([whole, short, wrong, begun, drawn, session])

    assert closeness.verdict(whole, on_gpu=True) == ("", False, "compared", True)
    assert closeness.verdict(begun, on_gpu=False) == ("", False, "compared", False)
    assert closeness.verdict(drawn, on_gpu=True) == ("", False, "only_whole", True)
    found = closeness.verdict(short, on_gpu=True)
    assert found.wrong.startswith("11 tokens, 12 were asked for") and not found.beyond
    found = closeness.verdict(wrong, on_gpu=True)
    assert found.wrong.startswith("token 7 is behind the best one by") and found.beyond
    found = closeness.verdict(session, on_gpu=True)
    assert found.wrong.startswith("the logits of step 1 are off by") and found.beyond
