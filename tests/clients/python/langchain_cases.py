"""LangChain's OpenAI package."""

import asyncio
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage  # pyright: ignore[reportMissingImports]
from langchain_core.tools import tool  # pyright: ignore[reportMissingImports]
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings  # pyright: ignore[reportMissingImports]
from openai import LengthFinishReasonError  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel

from tests.clients.python.harness import Target, case, run

PROMPT = "Tell me a story about a dog."


class Person(BaseModel):
    """What structured output asks for."""

    name: Literal["Tom", "Eva"]


def chat_model(target: Target, **options: Any) -> Any:
    fields: dict[str, Any] = {"max_tokens": 6, **options}
    return ChatOpenAI(model=target.model, base_url=target.base, api_key="unused", max_retries=0, **fields)


@case
def invoke(target: Target) -> None:
    answer = chat_model(target).invoke(PROMPT)
    assert answer.content and answer.usage_metadata["output_tokens"] == 6


@case
def stream(target: Target) -> None:
    chunks = list(chat_model(target, stream_usage=True).stream(PROMPT))
    assert "".join(chunk.content for chunk in chunks)
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 6


@case
def batch(target: Target) -> None:
    assert all(answer.content for answer in chat_model(target).batch([PROMPT, "Who is Tom?"]))


@case
def ainvoke(target: Target) -> None:
    assert asyncio.run(chat_model(target).ainvoke(PROMPT)).content


@case
def conversation(target: Target) -> None:
    said = [SystemMessage("Be brief."), HumanMessage(PROMPT), AIMessage("Tom had a dog."), HumanMessage("And?")]
    assert chat_model(target).invoke(said).content


@case
def seed_and_stop(target: Target) -> None:
    model = chat_model(target, seed=3, temperature=1.0, stop=["."])
    assert model.invoke(PROMPT).content == model.invoke(PROMPT).content


@case
def logprobs(target: Target) -> None:
    answer = chat_model(target).bind(logprobs=True, top_logprobs=2).invoke(PROMPT)
    assert len(answer.response_metadata["logprobs"]["content"]) == 6


@case
def completion(target: Target) -> None:
    model = OpenAI(model=target.model, base_url=target.base, api_key="unused", max_tokens=6, max_retries=0)
    assert model.invoke("Once upon a time")
    assert all(part for part in model.batch(["Once", "Tom"]))


@case
def completion_stream(target: Target) -> None:
    model = OpenAI(model=target.model, base_url=target.base, api_key="unused", max_tokens=6, max_retries=0)
    assert "".join(model.stream("Once upon a time"))


@case
def bind_tools(target: Target) -> None:
    @tool  # pyright: ignore[reportUntypedFunctionDecorator]
    def where(city: str) -> str:
        """Where a city is."""
        return city

    chat_model(target).bind_tools([where]).invoke(PROMPT)


@case
def structured_output(target: Target) -> None:
    assert chat_model(target, max_tokens=40).with_structured_output(Person).invoke(PROMPT).name in ("Tom", "Eva")


@case
def structured_output_by_tools(target: Target) -> None:
    person = chat_model(target, max_tokens=200).with_structured_output(Person, method="function_calling").invoke(PROMPT)
    assert person.name


@case
def json_mode(target: Target) -> None:
    try:
        chat_model(target).with_structured_output(Person, method="json_mode").invoke(PROMPT)
    except LengthFinishReasonError as error:  # a larger model would end its object
        assert (error.completion.choices[0].message.content or "").startswith("{")


@case
def several_choices(target: Target) -> None:
    chat_model(target, n=2).invoke(PROMPT)


@case
def responses(target: Target) -> None:
    chat_model(target, use_responses_api=True).invoke(PROMPT)


@case
def embeddings(target: Target) -> None:
    options: dict[str, Any] = {"check_embedding_ctx_length": False, "max_retries": 0}
    OpenAIEmbeddings(model=target.model, base_url=target.base, api_key="unused", **options).embed_query("x")


if __name__ == "__main__":
    run()
