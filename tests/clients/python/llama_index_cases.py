"""LlamaIndex' client for servers like OpenAI's."""

import asyncio
from typing import Any

from llama_index.core.llms import ChatMessage  # pyright: ignore[reportMissingImports]
from llama_index.core.tools import FunctionTool  # pyright: ignore[reportMissingImports]
from llama_index.llms.openai_like import OpenAILike  # pyright: ignore[reportMissingImports]

from tests.clients.python.harness import Target, case, run

PROMPT = "Tell me a story about a dog."


def model(target: Target, **options: Any) -> Any:
    fields: dict[str, Any] = {"max_tokens": 6, "is_chat_model": True, **options}
    return OpenAILike(model=target.model, api_base=target.base, api_key="unused", max_retries=0, **fields)


@case
def chat(target: Target) -> None:
    said = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=PROMPT)]
    assert model(target).chat(said).message.content


@case
def chat_stream(target: Target) -> None:
    assert "".join(part.delta or "" for part in model(target).stream_chat([ChatMessage(role="user", content=PROMPT)]))


@case
def chat_async(target: Target) -> None:
    assert asyncio.run(model(target).achat([ChatMessage(role="user", content=PROMPT)])).message.content


@case
def complete(target: Target) -> None:
    assert model(target, is_chat_model=False).complete("Once upon a time").text


@case
def complete_stream(target: Target) -> None:
    assert "".join(part.delta or "" for part in model(target, is_chat_model=False).stream_complete("Once upon a time"))


@case
def tools(target: Target) -> None:
    def where(city: str) -> str:
        """Where a city is."""
        return city

    function = FunctionTool.from_defaults(where)
    model(target, is_function_calling_model=True).chat_with_tools([function], user_msg=PROMPT)


if __name__ == "__main__":
    run()
