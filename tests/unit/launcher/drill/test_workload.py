"""By whom an answer was computed is read from its fingerprint, and a process of its own computes the same."""

import pytest

from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_launcher.drill.workload import DrillRequest, Numerics, References, incomplete, parts_of

OWN, NEXT, OTHER = Numerics(), Numerics("next"), Numerics(folder=1)
IDS = {"w8a8-1": OWN, "w8a8-1-next": NEXT, "w4a8-1": OTHER}


@pytest.mark.parametrize(
    ("fingerprint", "parts"),
    [
        ("w8a8-1", ((OWN, None),)),
        ("w8a8-1-next", ((NEXT, None),)),
        ("w8a8-1+w8a8-1-next@17", ((OWN, 17), (NEXT, None))),
        ("w8a8-1+w8a8-1-next@17+w8a8-1@20", ((OWN, 17), (NEXT, 20), (OWN, None))),
        ("w8a8-1+w4a8-1@17", ((OWN, 17), (OTHER, None))),
        ("w8a8-2", None),
        ("w8a8-1+w8a8-2@17", None),
        ("w8a8-1@17", None),
        ("w8a8-1+w8a8-1-next", None),
        ("", None),
    ],
)
def test_a_fingerprint_names_who_computed_which_tokens(fingerprint: str, parts: object) -> None:
    assert parts_of(fingerprint, IDS) == parts


def test_a_request_that_changed_its_id_goes_on_from_the_tokens_that_it_had() -> None:
    ask = DrillRequest(prompt=(5, 6, 7), params=SamplingParams(max_tokens=24, seed=1, ignore_eos=True))
    session = DrillRequest(prompt=(5, 6, 7, 8), params=ask.params, cuts=(2, 4))
    references = References(models=[BUNDLED_MODEL], requests=[ask, session], ids=IDS)
    old, new, both = names = ["w8a8-1", "w8a8-1-next", "w8a8-1+w8a8-1-next@9"]
    references.prepare([*((0, name) for name in names), (1, old), (1, new)])
    tokens = {name: answer.tokens for name in names if (answer := references.answer(0, name))}
    assert tokens[old] != tokens[new] and tokens[both] not in (tokens[old], tokens[new])
    assert tokens[both][:9] == tokens[old][:9] and len(tokens[both]) == 24
    digests = [answer.digests for name in (old, new) if (answer := references.answer(1, name))]
    assert len(digests) == 2 and not set(digests[0]) & set(digests[1])
    assert references.answer(0, "w8a8-2") is None


@pytest.mark.parametrize(
    ("ignore_eos", "tokens", "reason", "whole"),
    [
        (True, 9, "length", True),
        (True, 8, "length", False),
        (True, 8, "stop", False),
        (True, 10, "length", False),
        (False, 8, "stop", True),
        (False, 8, "length", False),
        (False, 9, "", False),
    ],
)
def test_an_answer_that_nobody_could_give_again_is_whole(
    ignore_eos: bool, tokens: int, reason: str, whole: bool
) -> None:
    ask = DrillRequest(prompt=(1,), params=SamplingParams(max_tokens=9, ignore_eos=ignore_eos))
    assert (incomplete(ask, tokens, reason) == "") == whole
