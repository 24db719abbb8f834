"""Anthropic's client: its routes come later, and its errors should be readable."""

from typing import Any

import anthropic  # pyright: ignore[reportMissingImports]

from tests.clients.python.harness import Target, case, run

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def client(target: Target) -> Any:
    return anthropic.Anthropic(base_url=target.url, api_key="unused", max_retries=0)


@case
def messages(target: Target) -> None:
    client(target).messages.create(model=target.model, max_tokens=4, messages=MESSAGES)


@case
def messages_stream(target: Target) -> None:
    with client(target).messages.stream(model=target.model, max_tokens=4, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream)


@case
def count_tokens(target: Target) -> None:
    client(target).messages.count_tokens(model=target.model, messages=MESSAGES)


@case
def errors_have_a_message(target: Target) -> None:
    try:
        client(target).messages.create(model=target.model, max_tokens=4, messages=MESSAGES)
    except anthropic.NotFoundError as error:
        assert "there is no POST /v1/messages" in str(error)
    else:
        raise AssertionError("there are messages: this case is over")


@case
def models(target: Target) -> None:
    assert [model.id for model in client(target).models.list().data] == [target.model]


if __name__ == "__main__":
    run()
