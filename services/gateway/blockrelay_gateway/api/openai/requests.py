"""Turns bodies of OpenAI's APIs into admission requests. Pure.

Everything that can be wrong with a request's content is found here or in `request_builder`, before anything is queued.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from blockrelay.errors import BadRequest
from blockrelay.protocol.encoding.prompt_logprobs import MAX_PROMPT_VALUES
from blockrelay.protocol.messages import MAX_CHOICES
from blockrelay.protocol.sampling_params import check_logprobs
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.idempotency import Identity
from blockrelay_gateway.api.client_headers import ClientHeaders
from blockrelay_gateway.api.openai.answer_parts import with_parts
from blockrelay_gateway.api.openai.chat_template import ChatTemplate
from blockrelay_gateway.api.openai.choices import choices_of, with_siblings
from blockrelay_gateway.api.openai.message_forms import text_of
from blockrelay_gateway.api.openai.reasoning import TAIL_TOKENS, behind_prompt, within
from blockrelay_gateway.api.openai.schemas import ChatMessage, ChatRequest, CompletionRequest
from blockrelay_gateway.api.openai.tools.prompts import call_of, with_names
from blockrelay_gateway.api.openai.tools.use import tool_use
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
        """Builds one request for each choice of a POST /v1/completions; those of a prompt follow each other."""
        self.builder.check_model(request.model)
        _check_stream_options(request)
        prompts = self._prompts(request.prompt)
        n = choices_of(request, prompts=len(prompts))
        names = who.names(len(prompts) * n)
        scored = request.logprobs if request.echo else None
        if request.echo:
            _check_whole(request, "echo")
        prompt_logprobs = _prompt_logprobs(request, prompts * n, echoed=scored)
        requests: list[AdmissionRequest] = []
        for index, prompt in enumerate(prompts):
            own = names[index * n : (index + 1) * n]
            first = self.builder.text(
                request,
                own[0],
                prompt,
                max_tokens=request.max_tokens,
                logprobs=request.logprobs,
                prompt_logprobs=prompt_logprobs,
                fewest_tokens=0 if request.echo else 1,
                headers=headers,
            )
            requests += with_siblings(first, own)
        return requests

    def chat(self, request: ChatRequest, headers: ClientHeaders, who: Identity) -> list[AdmissionRequest]:
        """Builds the requests for the assistant's next message, one for each choice of a POST /v1/chat/completions."""
        self.builder.check_model(request.model)
        _check_stream_options(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if len({request.max_tokens, request.max_completion_tokens} - {None}) > 1:
            raise BadRequest("max_tokens and max_completion_tokens contradict each other", param="max_tokens")
        newer = request.max_completion_tokens is not None
        template, tokenizer = self._chats()
        use, form = tool_use(request, self.builder.structured), template.call_form
        form = use.form_of(form) if use else form
        calls = use.grammar(form, self.builder.structured, several=template.takes_several_calls) if use else None
        prompt = self.chat_prompt(request, keyed=bool(who.fingerprint), tools=use.shown if use else ())
        names = who.names(n := choices_of(request))
        first = self.builder.text(
            request,
            names[0],
            prompt,
            prompt_logprobs=_prompt_logprobs(request, [prompt] * n),
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
        lets_text_begin = use.lets_text_begin if use else not first.params.grammar
        reasons = template.reasons and lets_text_begin
        reasoning = _reasoning(request, tokenizer.spell(prompt[-TAIL_TOKENS:])) if reasons else ""
        return with_siblings(with_parts(first, form if use else None, reasoning, tokenizer), names)

    def chat_prompt(
        self,
        request: ChatRequest,
        *,
        keyed: bool = False,
        add_special_tokens: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Renders the messages of a chat by the model's template, and returns the token ids of the prompt.

        A `keyed` request has the same prompt on every day. `add_special_tokens` adds those of the tokenizer to what the
        template writes, which has its own. `tools` are shown to the model. Raises BadRequest without a template, and
        for messages that it refuses.
        """
        template, _ = self._chats()
        if not request.messages:
            raise BadRequest("messages is empty", param="messages")
        messages = with_names([_message(message, index) for index, message in enumerate(request.messages)])
        answers, continues = request.add_generation_prompt is not False, bool(request.continue_final_message)
        if continues:
            _check_continued(messages, answers=answers)
        text = template.render(
            messages,
            keyed=keyed,
            answers=answers,
            continues=continues,
            variables=request.chat_template_kwargs or {},
            tools=tools,
        )
        return self.builder.encode(text, "messages", add_special_tokens=add_special_tokens)

    def _chats(self) -> tuple[ChatTemplate, Tokenizer]:
        """Returns the model's template and tokenizer. Raises BadRequest if it lacks one of them."""
        if self.template is None or self.builder.tokenizer is None:
            raise BadRequest("the model has no chat template: use /v1/completions", param="messages")
        return self.template, self.builder.tokenizer

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


def _prompt_logprobs(
    request: CompletionRequest | ChatRequest, prompts: Sequence[Sequence[int]], *, echoed: int | None = None
) -> int | None:
    """Returns how many alternatives workers list for each token of the prompts; None: they compute none.

    `prompts` has the prompt of each choice. `echoed` are those that an echo shows, None for none. Raises BadRequest for
    a request that cannot have them, and for more numbers than an answer may have.
    """
    if request.prompt_logprobs is not None:
        check_logprobs(request.prompt_logprobs, param="prompt_logprobs")
        _check_whole(request, "prompt_logprobs")
    listed = max((one for one in (request.prompt_logprobs, echoed) if one is not None), default=None)
    if listed is not None and (values := (listed + 1) * sum(map(len, prompts))) > MAX_PROMPT_VALUES:
        param = "prompt_logprobs" if listed == request.prompt_logprobs else "logprobs"
        message = f"{param} would have {values} numbers for the prompt, and an answer at most {MAX_PROMPT_VALUES}"
        raise BadRequest(f"{message}: send fewer or shorter prompts, or ask for fewer", param=param)
    return listed


def _check_whole(request: CompletionRequest | ChatRequest, param: str) -> None:
    """Raises BadRequest for a request with the field `param` whose answer comes in parts or later."""
    for name in ("stream", "background"):
        if getattr(request, name):
            raise BadRequest(f"{param} with {name} is not supported: leave out {name}", param=param)


def _check_continued(messages: Sequence[Mapping[str, Any]], *, answers: bool) -> None:
    """Raises BadRequest unless the model can continue the last message (`continue_final_message`)."""
    if answers:
        raise BadRequest("continue_final_message needs add_generation_prompt: false", param="continue_final_message")
    if messages[-1]["role"] != "assistant":
        raise BadRequest("continue_final_message needs a last message of the assistant", param="continue_final_message")
    if messages[-1].get("tool_calls"):
        raise BadRequest(
            "continue_final_message goes on with text, not with tool_calls", param="continue_final_message"
        )


def _reasoning(request: ChatRequest, tail: str) -> str:
    """Returns the reasoning of the answer to a chat whose prompt ends with `tail`."""
    if request.continue_final_message:
        return within(text_of({"content": request.messages[-1].content or ""}))
    return behind_prompt(tail) if request.add_generation_prompt is not False else ""


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
    if message.role == "assistant":
        others["reasoning_content"] = message.reasoning_content
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
