"""HTTP requests become ours: every field means something or is refused by name."""

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import GenerationDefaults
from blockrelay.errors import BadRequest, ContextLengthExceeded, NotFound
from blockrelay.observability.traceparent import clean_traceparent
from blockrelay.protocol.sampling_params import derive_seed
from blockrelay.settings import GatewaySettings
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.admission.idempotency import random_identity
from blockrelay_gateway.api.client_headers import ClientHeaders
from blockrelay_gateway.api.infer.requests import text_request
from blockrelay_gateway.api.infer.schemas import InferRequest
from blockrelay_gateway.api.openai.requests import OpenAIRequests
from blockrelay_gateway.api.openai.schemas import IGNORED, REFUSED, CompletionRequest
from blockrelay_gateway.api.openai.strictness import ignored_fields
from blockrelay_gateway.api.reading import BodyReader, RequestOrigin, reading_of
from tests.support.gateway.openai_requests import chat, complete


def test_a_plain_prompt_becomes_a_request_with_openai_defaults(requests: OpenAIRequests, tokenizer: Tokenizer) -> None:
    asked = complete(requests)
    assert asked.body.prompt.tolist() == tokenizer.encode("Tom")
    assert asked.params.temperature == 1.0
    assert asked.params.top_p == 1.0
    assert asked.params.max_tokens == 128
    assert asked.params.seed == derive_seed(asked.request_id)
    assert asked.body.params == asked.params.to_dict()
    assert not asked.body.background


def test_a_token_that_the_model_has_no_row_for_is_refused(requests: OpenAIRequests, folder: BlockFolder) -> None:
    assert folder.tokenizer_path is not None
    library = LibraryTokenizer.from_file(str(folder.tokenizer_path))
    library.add_special_tokens(["[PAD]"])
    model = replace(folder.model, vocab_size=library.token_to_id("[PAD]"))
    padded = replace(requests.builder, model=model, tokenizer=Tokenizer(library.to_str()))
    asking = OpenAIRequests(padded, requests.template)
    assert complete(asking, prompt="Tom").body.prompt.tolist() == library.encode("Tom").ids
    for ask in (
        lambda: complete(asking, prompt="Tom [PAD]"),
        lambda: complete(asking, prompt=[1, model.vocab_size]),
        lambda: chat(asking, messages=[{"role": "user", "content": "[PAD]"}]),
    ):
        with pytest.raises(BadRequest, match=f"token id {model.vocab_size} at index"):
            ask()


def test_the_models_recommendations_hold_where_the_client_says_nothing(requests: OpenAIRequests) -> None:
    generation = GenerationDefaults(
        temperature=0.25, top_k=7, top_p=0.5, min_p=0.125, max_tokens=3, repetition_penalty=1.25
    )
    wise = OpenAIRequests(replace(requests.builder, generation=generation), None)
    asked = complete(wise)
    assert (asked.params.temperature, asked.params.top_k, asked.params.top_p, asked.params.min_p) == (
        0.25,
        7,
        0.5,
        0.125,
    )
    assert (asked.params.max_tokens, asked.params.repetition_penalty) == (3, 1.25)
    assert complete(wise, repetition_penalty=1).params.repetition_penalty == 1
    explicit = complete(wise, temperature=0, top_k=-1, top_p=1, min_p=0, max_tokens=5)
    assert (explicit.params.temperature, explicit.params.top_k, explicit.params.max_tokens) == (0, 0, 5)


def test_every_sampling_field_arrives(requests: OpenAIRequests) -> None:
    asked = complete(
        requests, max_tokens=9, temperature=0.5, top_p=0.9, top_k=40, min_p=0.05, seed=-3, stop=["a", "b"],
        stop_token_ids=[5], ignore_eos=True, logprobs=4, background=True, timeout=2.5, user="u",
    )  # fmt: skip
    params = asked.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 40)
    assert (params.min_p, params.seed, params.stop, params.stop_token_ids) == (0.05, -3, ("a", "b"), (5,))
    assert (params.ignore_eos, params.logprobs, asked.timeout_s) == (True, 4, 2.5)
    assert asked.body.background


def test_a_stop_string_that_names_a_special_token_acts_as_its_id(
    requests: OpenAIRequests, tokenizer: Tokenizer
) -> None:
    end = tokenizer.stop_ids(["</s>"])
    assert len(end) == 1
    for asked in (complete, chat):
        params = asked(requests, stop=["</s>", "x"], stop_token_ids=[5]).params
        assert (params.stop, params.stop_token_ids) == (("</s>", "x"), (5, *end))
        assert asked(requests, stop="</s>", stop_token_ids=list(end)).params.stop_token_ids == end


def test_the_cache_salt_travels_with_the_request(requests: OpenAIRequests) -> None:
    assert complete(requests, cache_salt="t1").body.salt == "t1"
    assert chat(requests, cache_salt="t1").body.salt == "t1"
    assert complete(requests).body.salt == ""
    infer = InferRequest.model_validate({"prompt": "Tom", "cache_salt": "t1"})
    assert text_request(requests.builder, infer, ClientHeaders(), random_identity()).body.salt == "t1"


@pytest.mark.parametrize("salt", ["", "s" * 257, "half \ud800 a pair", 7])
def test_a_cache_salt_that_cannot_be_meant_is_refused(requests: OpenAIRequests, salt: object) -> None:
    with pytest.raises(BadRequest) as refused:
        complete(requests, cache_salt=salt)
    assert refused.value.param == "cache_salt"


def test_the_default_max_tokens_shrinks_to_the_room_in_the_context(requests: OpenAIRequests) -> None:
    assert complete(requests, prompt=[3] * 500).params.max_tokens == 12


@pytest.mark.parametrize(
    ("prompt", "count"), [("a", 1), ([1, 2], 1), (["a", "b"], 2), ([[1, 2], [3]], 2), ([[1]] * 128, 128)]
)
def test_prompts_come_in_four_spellings(requests: OpenAIRequests, prompt: Any, count: int) -> None:
    assert len(requests.completion(CompletionRequest(prompt=prompt), ClientHeaders(), random_identity())) == count


BAD_COMPLETIONS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field": ({"max_token": 5}, "max_token"),
    "a negative max_tokens": ({"max_tokens": -1}, "max_tokens"),
    "no tokens at all": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens as text": ({"max_tokens": "5"}, "max_tokens"),
    "max_tokens as a boolean": ({"max_tokens": True}, "max_tokens"),
    "a prompt beyond the context": ({"prompt": [3] * 600}, "prompt"),
    "a prompt that fills the context": ({"prompt": [3] * 512}, "prompt"),
    "a token id out of range": ({"prompt": [1, 512]}, "prompt"),
    "a negative token id": ({"prompt": [-1]}, "prompt"),
    "a token id beyond any integer": ({"prompt": [1 << 80]}, "prompt"),
    "a boolean token id": ({"prompt": [True]}, "prompt"),
    "an empty prompt list": ({"prompt": []}, "prompt"),
    "an empty inner prompt": ({"prompt": [[]]}, "prompt"),
    "a mixed prompt": ({"prompt": ["a", 1]}, "prompt"),
    "a nested mixed prompt": ({"prompt": [["a"]]}, "prompt"),
    "too many prompts": ({"prompt": ["a"] * 129}, "prompt"),
    "a prompt that is a number": ({"prompt": 5}, "prompt"),
    "half a surrogate pair": ({"prompt": "\ud800"}, "prompt"),
    "a temperature below zero": ({"temperature": -0.1}, "temperature"),
    "a temperature above two": ({"temperature": 2.1}, "temperature"),
    "a temperature that is no number": ({"temperature": float("nan")}, "temperature"),
    "an infinite temperature": ({"temperature": float("inf")}, "temperature"),
    "top_p of zero": ({"top_p": 0}, "top_p"),
    "top_p above one": ({"top_p": 1.5}, "top_p"),
    "a negative top_k": ({"top_k": -2}, "top_k"),
    "min_p above one": ({"min_p": 2}, "min_p"),
    "a seed of 65 bits": ({"seed": 1 << 64}, "seed"),
    "an empty stop string": ({"stop": ""}, "stop"),
    "too many stop strings": ({"stop": ["a"] * 17}, "stop"),
    "a stop that is a number": ({"stop": 5}, "stop"),
    "a stop token out of range": ({"stop_token_ids": [512]}, "stop_token_ids"),
    "too many logprobs": ({"logprobs": 21}, "logprobs"),
    "negative logprobs": ({"logprobs": -1}, "logprobs"),
    "too large a penalty": ({"presence_penalty": 2.5}, "presence_penalty"),
    "too small a penalty": ({"frequency_penalty": -2.5}, "frequency_penalty"),
    "a repetition penalty of zero": ({"repetition_penalty": 0}, "repetition_penalty"),
    "a bias for a word": ({"logit_bias": {"the": 1}}, "logit_bias"),
    "a bias for a token that is not there": ({"logit_bias": {"512": 1}}, "logit_bias"),
    "a bias for a token of very many digits": ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    "a bias for one token twice": ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    "too large a bias": ({"logit_bias": {"5": 101}}, "logit_bias"),
    "too many biases": ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
    "more min_tokens than max_tokens": ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    "an empty bad word": ({"bad_words": [" "]}, "bad_words"),
    "too many bad words": ({"bad_words": ["a"] * 33}, "bad_words"),
    "an echo in a stream": ({"echo": True, "stream": True}, "echo"),
    "prompt_logprobs in a stream": ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    "a suffix": ({"suffix": "x"}, "suffix"),
    "best of two": ({"best_of": 2}, "best_of"),
    "a timeout of zero": ({"timeout": 0}, "timeout"),
    "a timeout of no number": ({"timeout": float("nan")}, "timeout"),
    "stream options without a stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "an unknown stream option": ({"stream_options": {"usage": True}}, "stream_options.usage"),
}


@pytest.mark.parametrize("name", BAD_COMPLETIONS)
def test_a_bad_completion_is_refused_by_the_name_of_its_field(requests: OpenAIRequests, name: str) -> None:
    fields, param = BAD_COMPLETIONS[name]
    with pytest.raises(BadRequest) as refused:
        complete(requests, **fields)
    assert refused.value.param == param
    assert param.rpartition(".")[2] in str(refused.value)


NEUTRAL: dict[str, Any] = {
    "n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "echo": False,
    "suffix": None, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "store": False,
    "metadata": {}, "service_tier": "auto", "parallel_tool_calls": True, "user": "me", "prompt_cache_key": "k",
    "repetition_penalty": 1.0, "min_tokens": 0,
}  # fmt: skip


def test_fields_that_change_logits_reach_the_worker(requests: OpenAIRequests) -> None:
    params = complete(
        requests, logit_bias={"5": 1, "7": -100}, presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.1,
        min_tokens=3, bad_words=["Tom"],
    ).params  # fmt: skip
    assert params.logit_bias == ((5, 1.0), (7, -100.0)) and params.min_tokens == 3
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -1, 1.1)
    assert len(params.bad_words) == 2, "as the text begins with it, and behind a space"


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_values_of_fields_we_lack_are_accepted(requests: OpenAIRequests, name: str) -> None:
    assert complete(requests, **{name: NEUTRAL[name]}).params.max_tokens == 128


def test_no_field_that_we_do_nothing_about_is_both_refused_and_ignored() -> None:
    assert not REFUSED.keys() & IGNORED.keys()


@pytest.mark.parametrize("name", IGNORED)
def test_what_changes_nothing_is_ignored_and_named(name: str) -> None:
    def asked(value: object) -> CompletionRequest:
        return CompletionRequest.model_validate({"prompt": "Tom", name: value})

    for neutral in (None, *IGNORED[name]):
        assert ignored_fields(asked(neutral), strict=True) == ()
    assert ignored_fields(asked("something")) == (name,)
    with pytest.raises(BadRequest, match="Blockrelay-Strict") as refused:
        ignored_fields(asked("something"), strict=True)
    assert refused.value.param == name


def test_another_models_name_is_not_found(requests: OpenAIRequests) -> None:
    with pytest.raises(NotFound, match="gpt-4"):
        complete(requests, model="gpt-4")
    assert complete(requests, model="tiny")


def test_a_model_without_a_tokenizer_takes_ids_only(requests: OpenAIRequests) -> None:
    bare = OpenAIRequests(replace(requests.builder, tokenizer=None), None)
    assert complete(bare, prompt=[1, 2]).body.prompt.tolist() == [1, 2]
    with pytest.raises(BadRequest, match="token ids"):
        complete(bare, prompt="text")
    with pytest.raises(BadRequest) as refused:
        complete(bare, prompt=[1], stop="x")
    assert refused.value.param == "stop"


def test_null_means_the_default_for_every_field(requests: OpenAIRequests) -> None:
    nothing = {name: None for name in CompletionRequest.model_fields if name != "prompt"}
    assert replace(complete(requests, **nothing).params, seed=0) == replace(complete(requests).params, seed=0)


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True),
        ("00-xyz-b7ad6b7169203331-01", False),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", False),
        (f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01", False),
        ("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", False),
        ("", False),
        (None, False),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\nx: y", False),
    ],
)
def test_only_a_well_formed_traceparent_is_carried(header: str | None, kept: bool) -> None:
    assert clean_traceparent(header) == (header if kept else "")


class NeverEncodes(Tokenizer):
    """Tokenising is what takes time: a text that is too long by its bytes must not get there."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("tokenised")


def test_a_text_that_is_too_long_by_its_bytes_is_not_tokenised(requests: OpenAIRequests, folder: BlockFolder) -> None:
    assert folder.tokenizer_path is not None
    builder = replace(requests.builder, tokenizer=NeverEncodes.from_file(folder.tokenizer_path))
    assert builder.tokenizer is not None
    most = builder.model.max_position * builder.tokenizer.longest
    for text in ("a" * (most + 1), "\u00e9" * (most // 2 + 1)):
        with pytest.raises(ContextLengthExceeded, match=r"maximum context length is 512 tokens, .* bytes"):
            builder.encode(text, "prompt")
    with pytest.raises(AssertionError):
        builder.encode("a" * most, "prompt")


def test_a_text_that_is_too_long_by_its_beginning_is_not_tokenised_whole(
    requests: OpenAIRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's longest token is so long that the bound by bytes lets a megabyte pass."""
    tokenizer = requests.builder.tokenizer
    assert tokenizer is not None
    monkeypatch.setattr(tokenizer, "longest", 10_000)
    with pytest.raises(ContextLengthExceeded, match="and prompt has more than 1024"):
        requests.builder.encode("x y " * 250_000, "prompt")
    whole = "x " * 20_000
    monkeypatch.setattr(tokenizer, "longest", 1 << 30)
    longer = replace(requests.builder, model=replace(requests.builder.model, max_position=1 << 20))
    assert longer.encode(whole, "prompt") == tokenizer.encode(whole), "one that may fit is tokenised as ever"


def test_no_nesting_that_can_be_parsed_fails_later(folder: BlockFolder) -> None:
    reader = reading_of(GatewaySettings(model=folder.root), folder)
    bodies = {
        BodyReader.chat: '{"messages": [{"role": "user", "content": "x"}], "user": %s}',
        BodyReader.completion: '{"prompt": "x", "user": %s}',
        BodyReader.infer: '{"prompt": "x", "input_tensors": {"a": %s}}',
    }
    sender = RequestOrigin("t", ClientHeaders(), ("key",))
    for read, body in bodies.items():
        refused = [
            reading.refusal
            for levels in range(800, 1000)
            if (reading := read(reader, (body % ("[" * levels + "]" * levels)).encode(), sender)).refusal
        ]
        assert refused and all(isinstance(one, BadRequest) for one in refused)
