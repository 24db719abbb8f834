"""Sampling parameters that exist are valid, and a complaint names the field."""

import json
from typing import Any

import pytest

from blockrelay.errors import BadRequest, WireError
from blockrelay.protocol.sampling_params import SamplingParams, check_prompt, derive_seed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", 2**40),
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("min_p", float("inf")),
        ("seed", 2**64),
        ("seed", 1.0),
        ("stop", "text"),
        ("stop", ("",)),
        ("stop", ("x" * 257,)),
        ("stop", ("x",) * 17),
        ("stop", ("\ud800",)),
        ("stop", (5,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(65))),
        ("ignore_eos", 1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", True),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=field.split("_")[0]) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert "\n" not in str(caught.value)


def test_parameters_survive_a_message() -> None:
    params = SamplingParams(
        max_tokens=7, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=-5, stop=("a", "b"), stop_token_ids=(4,),
        ignore_eos=True, logprobs=2, prompt_logprobs=0,
    )  # fmt: skip
    assert SamplingParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params
    assert SamplingParams.from_dict(SamplingParams().to_dict()) == SamplingParams()


@pytest.mark.parametrize("plain", [{"beam": 2}, {"stop": "abc"}, {"stop_token_ids": 5}])
def test_a_message_with_other_fields_is_not_understood(plain: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        SamplingParams.from_dict(plain)


def test_a_message_with_a_wrong_value_is_refused_like_a_request() -> None:
    with pytest.raises(BadRequest, match="temperature"):
        SamplingParams.from_dict({"temperature": None})


def test_end_tokens_are_the_models_and_the_requests() -> None:
    assert SamplingParams(stop_token_ids=(9,)).end_ids((2, 3)) == {2, 3, 9}
    assert SamplingParams(stop_token_ids=(9,), ignore_eos=True).end_ids((2, 3)) == {9}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param", "complaint"),
    [
        ([], 1, "ids", "empty"),
        ([1, 10], 1, "ids", "token id 10 at index 1 is not in 0..9"),
        ([-1], 1, "ids", "token id -1"),
        ([1] * 9, 1, "ids", "context length is 8 tokens, and ids has 9"),
        ([1] * 8, 1, "ids", "context length is 8 tokens, and ids has 8"),
        ([1] * 5, 4, "max_tokens", "together beyond the model's context of 8"),
    ],
)
def test_a_prompt_the_model_cannot_run_is_refused(
    prompt: list[int], max_tokens: int, param: str, complaint: str
) -> None:
    with pytest.raises(BadRequest, match=complaint) as caught:
        check_prompt(prompt, SamplingParams(max_tokens=max_tokens), vocab_size=10, context=8, param="ids")
    assert caught.value.param == param


def test_a_prompt_that_just_fits_passes() -> None:
    check_prompt([1] * 5, SamplingParams(max_tokens=3), vocab_size=10, context=8)
    check_prompt([1] * 8, SamplingParams(max_tokens=0), vocab_size=10, context=8)


def test_a_stop_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(BadRequest, match="stop_token_ids"):
        check_prompt([1], SamplingParams(stop_token_ids=(10,)), vocab_size=10, context=80)


def test_a_derived_seed_is_stable_and_fits_into_a_json_number() -> None:
    assert derive_seed("req-1") == derive_seed("req-1") != derive_seed("req-2")
    assert derive_seed("req-1") == 8373911205155458
    assert 0 <= derive_seed("req-1") < 2**53
