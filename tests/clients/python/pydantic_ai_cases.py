"""Pydantic AI."""

import asyncio
from contextlib import suppress
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import (  # pyright: ignore[reportMissingImports]
    Agent,
    NativeOutput,
    PromptedOutput,
    UnexpectedModelBehavior,
    capture_run_messages,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # pyright: ignore[reportMissingImports]
from pydantic_ai.providers.openai import OpenAIProvider  # pyright: ignore[reportMissingImports]

from tests.clients.python.harness import Target, case, run

PROMPT = "Tell me a story about a dog."


class Person(BaseModel):
    """What structured output asks for."""

    name: Literal["Tom", "Eva"]


def agent(
    target: Target, *, settings: dict[str, Any] | None = None, kind: Any = OpenAIChatModel, **options: Any
) -> Any:
    provider = OpenAIProvider(base_url=target.base, api_key="unused")
    settings = {"max_tokens": 8, **(settings or {})}
    return Agent(kind(target.model, provider=provider), model_settings=settings, **options)


async def streamed(one: Any) -> tuple[str, Any]:
    async with one.run_stream(PROMPT) as answer:
        text = "".join([part async for part in answer.stream_text(delta=True)])
        usage = answer.usage
        return text, usage() if callable(usage) else usage


@case
def run_sync(target: Target) -> None:
    assert agent(target).run_sync(PROMPT).output


@case
def run_stream(target: Target) -> None:
    text, usage = asyncio.run(streamed(agent(target)))
    assert text and usage.output_tokens == 8


@case
def continuous_usage(target: Target) -> None:
    text, usage = asyncio.run(streamed(agent(target, settings={"openai_continuous_usage_stats": True})))
    assert text and usage.output_tokens == 8


@case
def message_history(target: Target) -> None:
    one = agent(target, instructions="Be brief.")
    first = one.run_sync(PROMPT)
    assert one.run_sync("And then?", message_history=first.all_messages()).output


@case
def settings_of_sampling(target: Target) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 3, "top_p": 0.9, "stop_sequences": ["THE END"]}
    texts = {agent(target, settings=settings).run_sync(PROMPT).output for _ in range(2)}
    assert len(texts) == 1


@case
def tools(target: Target) -> None:
    one = agent(target)

    @one.tool_plain
    def where(city: str) -> str:  # pyright: ignore[reportUnusedFunction]
        """Where a city is."""
        return city

    one.run_sync(PROMPT)


@case
def output_by_tools(target: Target) -> None:
    settings = {"max_tokens": 200, "parallel_tool_calls": False}
    assert agent(target, settings=settings, output_type=Person).run_sync(PROMPT).output.name


@case
def output_native(target: Target) -> None:
    answer = agent(target, settings={"max_tokens": 40}, output_type=NativeOutput(Person)).run_sync(PROMPT)
    assert answer.output.name in ("Tom", "Eva")


@case
def output_prompted(target: Target) -> None:
    with capture_run_messages() as messages, suppress(UnexpectedModelBehavior):  # this model says nothing of a name
        agent(target, output_type=PromptedOutput(Person)).run_sync(PROMPT)
    assert messages[1].parts[0].content.startswith("{")


@case
def responses(target: Target) -> None:
    agent(target, kind=OpenAIResponsesModel).run_sync(PROMPT)


if __name__ == "__main__":
    run()
