"""LiteLLM, through its OpenAI provider."""

import asyncio
from typing import Any, Literal

import litellm  # pyright: ignore[reportMissingImports]

from tests.clients.python.harness import Target, case, run

MESSAGES = [{"role": "user", "content": "Tell me a story about a dog."}]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def ask(target: Target, **fields: Any) -> Any:
    asked: dict[str, Any] = {"max_tokens": 6, "messages": MESSAGES, **fields}
    return litellm.completion(
        model=f"openai/{target.model}", api_base=target.base, api_key="unused", num_retries=0, max_retries=0, **asked
    )


def sends(target: Target) -> None:
    assert ask(target, **target.sends).choices[0].message.content


@case
def chat(target: Target) -> None:
    answer = ask(target)
    assert answer.choices[0].message.content and answer.usage.completion_tokens == 6


@case
def chat_stream(target: Target) -> None:
    chunks = list(ask(target, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert chunks[-1].usage.completion_tokens == 6


@case
def chat_async(target: Target) -> None:
    answer = asyncio.run(
        litellm.acompletion(
            model=f"openai/{target.model}", api_base=target.base, api_key="unused", messages=MESSAGES, max_tokens=4
        )
    )
    assert answer.choices[0].message.content


@case
def text_completion(target: Target) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{target.model}",
        api_base=target.base,
        api_key="unused",
        prompt="Once",
        max_tokens=4,
    )
    assert answer.choices[0].text


@case
def hosted_vllm(target: Target) -> None:
    answer = litellm.completion(
        model=f"hosted_vllm/{target.model}", api_base=target.base, messages=MESSAGES, max_tokens=4, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in answer)


@case
def get_valid_models(target: Target) -> None:
    found = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=target.base, api_key="unused"
    )
    assert any(target.model in name for name in found), found


@case
def prompt_beyond_the_context(target: Target) -> None:
    try:
        ask(target, messages=[{"role": "user", "content": "word " * 3000}])
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("taken")


@case
def tools(target: Target) -> None:
    ask(target, tools=[FUNCTION])


@case
def structured_output(target: Target) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: Literal["Tom", "Eva"]

    answer = ask(target, response_format=Person, max_tokens=40)
    assert Person.model_validate_json(answer.choices[0].message.content)


@case
def responses(target: Target) -> None:
    litellm.responses(model=f"openai/{target.model}", api_base=target.base, api_key="unused", input="x", num_retries=0)


@case
def embedding(target: Target) -> None:
    litellm.embedding(
        model=f"openai/{target.model}", api_base=target.base, api_key="unused", input=["x"], max_retries=0
    )


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    run(sends=sends)
