"""OpenAI's client."""

import asyncio
from typing import Any, Literal

from openai import AsyncOpenAI, BadRequestError, OpenAI

from tests.clients.python.harness import Target, case, run

MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a dog."}]
PROMPT = "Once upon a time"


def client(target: Target, **options: Any) -> OpenAI:
    return OpenAI(base_url=target.base, api_key="unused", max_retries=0, **options)


def sends(target: Target) -> None:
    """A chat with these fields is answered, streamed and not, with the same text in its first choice."""
    api = client(target)
    fields: Any = {
        "model": target.model,
        "messages": MESSAGES,
        "max_tokens": 8,
        "seed": 5,
        "extra_body": dict(target.sends),
    }
    whole = api.chat.completions.create(**fields)
    with api.chat.completions.create(stream=True, **fields) as stream:
        choices = [choice for chunk in stream for choice in chunk.choices]
    streamed = "".join(choice.delta.content or "" for choice in choices if choice.index == 0)
    assert whole.choices[0].message.content == streamed != ""


@case
def models(target: Target) -> None:
    (model,) = client(target).models.list().data
    extra = model.model_extra or {}
    assert model.id == target.model and extra["context_length"] == extra["meta"]["n_ctx_train"] > 0


@case
def model(target: Target) -> None:
    assert client(target).models.retrieve(target.model).id == target.model


@case
def chat(target: Target) -> None:
    answer = client(target).chat.completions.create(model=target.model, messages=MESSAGES, max_tokens=12)
    assert answer.usage and answer.usage.completion_tokens == 12 and answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"


@case
def chat_stream(target: Target) -> None:
    usage, text = None, ""
    with client(target).chat.completions.create(
        model=target.model, messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
    assert text and usage and usage.completion_tokens == 12


@case
def chat_async(target: Target) -> None:
    async def ask() -> str:
        async with AsyncOpenAI(base_url=target.base, api_key="unused") as api:
            stream = await api.chat.completions.create(model=target.model, messages=MESSAGES, max_tokens=5, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask())


@case
def chat_stream_helper(target: Target) -> None:
    asked: Any = {"model": target.model, "messages": MESSAGES, "max_tokens": 200, "stop": ["."]}
    with client(target).chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.content


@case
def completion(target: Target) -> None:
    answer = client(target).completions.create(model=target.model, prompt=PROMPT, max_tokens=6)
    assert answer.choices[0].text and answer.usage and answer.usage.completion_tokens == 6


@case
def completion_stream(target: Target) -> None:
    with client(target).completions.create(model=target.model, prompt=PROMPT, max_tokens=6, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream)


@case
def completion_prompts(target: Target) -> None:
    answer = client(target).completions.create(model=target.model, prompt=[PROMPT, "Tom"], max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1]


@case
def completion_token_ids(target: Target) -> None:
    assert client(target).completions.create(model=target.model, prompt=[1, 15, 7], max_tokens=4).choices[0].text


@case
def completion_logprobs(target: Target) -> None:
    answer = client(target).completions.create(model=target.model, prompt=PROMPT, max_tokens=4, logprobs=2)
    told = answer.choices[0].logprobs
    assert told and told.token_logprobs and len(told.token_logprobs) == 4


@case
def completion_echo(target: Target) -> None:
    answer = client(target).completions.create(model=target.model, prompt=PROMPT, max_tokens=4, echo=True)
    assert answer.choices[0].text.startswith(PROMPT)


@case
def completion_suffix(target: Target) -> None:
    client(target).completions.create(model=target.model, prompt=PROMPT, max_tokens=4, suffix=" The end.")


@case
def completion_best_of(target: Target) -> None:
    client(target).completions.create(model=target.model, prompt=PROMPT, max_tokens=4, best_of=2)


@case
def chat_logprobs(target: Target) -> None:
    answer = client(target).chat.completions.create(
        model=target.model, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2
    )
    told = answer.choices[0].logprobs
    assert told and told.content and [len(token.top_logprobs) for token in told.content] == [2] * 4


@case
def continuous_usage(target: Target) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    with client(target).chat.completions.create(
        model=target.model, messages=MESSAGES, max_tokens=5, stream=True, stream_options=options
    ) as stream:
        counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    assert counts[:6] == list(range(6)) and counts[-1] == 5


@case
def max_tokens_beyond_the_context(target: Target) -> None:
    answer = client(target).chat.completions.create(model=target.model, messages=MESSAGES, max_tokens=65_535)
    assert (answer.choices[0].model_extra or {})["max_tokens"] < 65_535


@case
def prompt_beyond_the_context(target: Target) -> None:
    try:
        client(target).chat.completions.create(
            model=target.model, messages=[{"role": "user", "content": "word " * 3000}], max_tokens=5
        )
    except BadRequestError as error:
        assert error.code == "context_length_exceeded" and error.param == "messages"
    else:
        raise AssertionError("taken")


@case
def content_parts(target: Target) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "is it?"}]}]
    assert client(target).chat.completions.create(model=target.model, messages=parts, max_tokens=4).choices


@case
def answers_sent_back(target: Target) -> None:
    """What `message.model_dump()` gives, with everything that is null."""
    api = client(target)
    answer = api.chat.completions.create(model=target.model, messages=MESSAGES, max_tokens=5).choices[0].message
    again: Any = [*MESSAGES, answer.model_dump(), {"role": "user", "content": "And then?"}]
    assert api.chat.completions.create(model=target.model, messages=again, max_tokens=5).choices[0].message.content


@case
def content_null(target: Target) -> None:
    messages: Any = [*MESSAGES, {"role": "assistant", "content": None}, *MESSAGES]
    assert client(target).chat.completions.create(model=target.model, messages=messages, max_tokens=4).choices


@case
def image(target: Target) -> None:
    parts: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    client(target).chat.completions.create(
        model=target.model, messages=[{"role": "user", "content": parts}], max_tokens=4
    )


@case
def tool_results(target: Target) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "5"},
    ]
    client(target).chat.completions.create(model=target.model, messages=messages, max_tokens=4)


@case
def idempotent_retries(target: Target) -> None:
    """With the header's name set, the client's own retries are one request."""
    api = client(target)
    api._idempotency_header = "Idempotency-Key"  # pyright: ignore[reportPrivateUsage]
    api = client(target)
    api._idempotency_header = "Idempotency-Key"  # pyright: ignore[reportPrivateUsage]
    key = api._idempotency_key()  # pyright: ignore[reportPrivateUsage]
    api._idempotency_key = lambda: key  # pyright: ignore[reportPrivateUsage]  # as in a retry
    asked: Any = {"model": target.model, "prompt": PROMPT, "max_tokens": 6, "temperature": 1}
    first, second = (api.completions.with_raw_response.create(**asked) for _ in range(2))
    assert first.headers["x-request-id"] == second.headers["x-request-id"]
    assert second.headers["idempotent-replayed"] == "true"


@case
def keyed_stream(target: Target) -> None:
    """Ids of events do not disturb the client, nor do keep-alives."""
    with client(target).completions.create(
        model=target.model, prompt=PROMPT, max_tokens=6, stream=True, extra_headers={"Idempotency-Key": "openai-stream"}
    ) as stream:
        assert len([chunk for chunk in stream if chunk.choices[0].finish_reason is None]) == 6


@case
def request_ids(target: Target) -> None:
    raw = client(target).completions.with_raw_response.create(
        model=target.model, prompt=PROMPT, max_tokens=2, extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["x-client-request-id"] == "mine" and raw.headers["x-request-id"].startswith("req-")
    assert raw.parse().choices


@case
def embeddings(target: Target) -> None:
    client(target).embeddings.create(model=target.model, input="x")


@case
def responses(target: Target) -> None:
    client(target).responses.create(model=target.model, input="x")


@case
def structured_output(target: Target) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: Literal["Tom", "Eva"]

    completions = client(target).chat.completions
    answer = completions.parse(model=target.model, messages=MESSAGES, max_tokens=40, response_format=Person)
    parsed = answer.choices[0].message.parsed
    assert parsed is not None and parsed.name in ("Tom", "Eva")


@case
def moderations(target: Target) -> None:
    client(target).moderations.create(input="x")


@case
def batches(target: Target) -> None:
    client(target).batches.list()


@case
def files(target: Target) -> None:
    client(target).files.list()


if __name__ == "__main__":
    run(sends=sends)
