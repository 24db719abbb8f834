"""Turns bodies of OpenAI's APIs into admission requests. Pure.

Everything that can be wrong with a request's content is found here or in `request_builder`, before anything is queued.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from blockrelay.errors import BadRequest
from blockrelay.protocol.messages import MAX_CHOICES
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.idempotency import Identity
from blockrelay_gateway.api.client_headers import ClientHeaders
from blockrelay_gateway.api.openai.chat_template import ChatTemplate
from blockrelay_gateway.api.openai.schemas import ChatMessage, ChatRequest, CompletionRequest
from blockrelay_gateway.api.openai.tools.prompts import call_of, with_names
from blockrelay_gateway.api.openai.tools.use import tool_use, with_calls
from blockrelay_gateway.api.request_builder import FieldNames, RequestBuilder


@dataclass(frozen=True, slots=True)
class OpenAIRequests:
    """Builds requests for one model. Its methods raise BadRequest, or NotFound for another model, with the field.

    Their argument `who` has the request ids.
    """

    builder: RequestBuilder
    template: ChatTemplate | None
    """The model's chat template; None: chats are refused."""

    def completion(self, request: CompletionRequest, headers: ClientHeaders, who: Identity) -> list[AdmissionRequest]:
        """Builds one request for each prompt of a POST /v1/completions."""
        self.builder.check_model(request.model)
        _check_stream_options(request)
        prompts = self._prompts(request.prompt)
        if request.background and len(prompts) > 1:
            raise BadRequest("background takes one prompt per request", param="background")
        names = who.names(len(prompts))
        return [
            self.builder.text(
                request, name, prompt, max_tokens=request.max_tokens, logprobs=request.logprobs, headers=headers
            )
            for name, prompt in zip(names, prompts, strict=True)
        ]

    def chat(self, request: ChatRequest, headers: ClientHeaders, who: Identity) -> AdmissionRequest:
        """Builds the request for the assistant's next message, of a POST /v1/chat/completions."""
        self.builder.check_model(request.model)
        _check_stream_options(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if len({request.max_tokens, request.max_completion_tokens} - {None}) > 1:
            raise BadRequest("max_tokens and max_completion_tokens contradict each other", param="max_tokens")
        newer = request.max_completion_tokens is not None
        if self.template is None or self.builder.tokenizer is None:
            raise BadRequest("the model has no chat template: use /v1/completions", param="messages")
        if not request.messages:
            raise BadRequest("messages is empty", param="messages")
        messages = with_names([_message(message, index) for index, message in enumerate(request.messages)])
        answers, continues = request.add_generation_prompt is not False, bool(request.continue_final_message)
        if continues:
            _check_continued(messages, answers=answers)
        use, form = tool_use(request, self.builder.structured), self.template.call_form
        calls = use.grammar(form, self.builder.structured) if use else None
        text = self.template.render(
            messages,
            keyed=bool(who.fingerprint),
            answers=answers,
            continues=continues,
            variables=request.chat_template_kwargs or {},
            tools=use.shown if use else (),
        )
        (name,) = who.names()
        asked = self.builder.text(
            request,
            name,
            self.builder.encode(text, "messages", add_special_tokens=False),
            max_tokens=request.max_completion_tokens if newer else request.max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            headers=headers,
            open_ended=True,
            calls=calls,
            names=FieldNames(
                prompt="messages",
                max_tokens="max_completion_tokens" if newer else "max_tokens",
                logprobs="top_logprobs",
            ),
        )
        return with_calls(asked, form, self.builder.tokenizer) if use else asked

    def _prompts(self, prompt: object) -> list[list[int]]:
        """The token ids of each prompt in the field `prompt`. Raises BadRequest."""
        if isinstance(prompt, str):
            return [self.builder.encode(prompt, "prompt")]
        items = cast(list[object], prompt) if isinstance(prompt, list) else []
        if items and all(type(item) is int for item in items):
            return [cast(list[int], items)]
        if isinstance(prompt, list) and not items:
            raise BadRequest("prompt is empty: at least one token is needed", param="prompt")
        if not items or not (
            all(isinstance(item, str) for item in items) or all(isinstance(item, list) for item in items)
        ):
            raise BadRequest(
                "prompt must be text, token ids, a list of texts or a list of lists of token ids", param="prompt"
            )
        if len(items) > MAX_CHOICES:
            raise BadRequest(f"prompt takes at most {MAX_CHOICES} prompts, not {len(items)}", param="prompt")
        prompts: list[list[int]] = []
        for index, item in enumerate(items):
            if isinstance(item, str):
                prompts.append(self.builder.encode(item, "prompt"))
                continue
            tokens = cast(list[object], item)
            if not all(type(token) is int for token in tokens):
                raise BadRequest(f"prompt: item {index} is not a list of token ids", param="prompt")
            prompts.append(cast(list[int], tokens))
        return prompts


def _check_stream_options(request: CompletionRequest | ChatRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")


def _check_continued(messages: Sequence[Mapping[str, Any]], *, answers: bool) -> None:
    """Raises BadRequest unless the model can continue the last message (`continue_final_message`)."""
    if answers:
        raise BadRequest("continue_final_message needs add_generation_prompt: false", param="continue_final_message")
    if messages[-1]["role"] != "assistant":
        raise BadRequest("continue_final_message needs a last message of the assistant", param="continue_final_message")


def _message(message: ChatMessage, index: int) -> dict[str, Any]:
    """The fields of a message that the chat template gets: role, content, and what there is of name, calls and id."""
    param = f"messages.{index}"
    content: object = "" if message.content is None and message.role in ("assistant", "tool") else message.content
    plain: dict[str, Any] = {"role": message.role, "content": _content(content, f"{param}.content")}
    if message.tool_calls:
        if message.role != "assistant":
            raise BadRequest(f"{param}.tool_calls is for messages of the assistant", param=f"{param}.tool_calls")
        calls = enumerate(message.tool_calls)
        plain["tool_calls"] = [call_of(call, f"{param}.tool_calls.{place}") for place, call in calls]
    others = {"name": message.name, "tool_call_id": message.tool_call_id}
    return plain | {name: value for name, value in others.items() if value is not None}


def _content(content: object, param: str) -> str | list[dict[str, str]]:
    """The checked content of a message: a text, or a list of parts of type text. Raises BadRequest."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{param} must be text or a list of parts", param=param)
    parts: list[dict[str, str]] = []
    for part in cast(list[object], content):
        fields = cast(dict[str, object], part) if isinstance(part, dict) else {}
        text = fields.get("text")
        if fields.get("type") != "text" or not isinstance(text, str):
            raise BadRequest(f'{param}: only parts {{"type": "text", "text": ...}} are supported', param=param)
        parts.append({"type": "text", "text": text})
    return parts or ""
