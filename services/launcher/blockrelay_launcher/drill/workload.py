"""Makes the random requests of a drill, and computes the right answer of each alone, for every numerics id."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import ServiceUnavailable, WireError
from blockrelay.host.child_command import module_command, run_command
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams, derive_seed
from blockrelay.text.grammars import grammars_of
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_launcher.client.resuming import Refused
from blockrelay_launcher.drill.chats import Call, DrillChat, cut, make_chat, with_record
from blockrelay_launcher.drill.options import LONGEST_ANSWER, SHORTEST_ANSWER

#: Tokens of the longest prompt; half of the context if that is less.
LONGEST_PROMPT = 400
_TEXT = """the a fox dog boat garden kite river old small red found gave went saw and then but because was happy story
Lily Ben Molly Tom said again under over into house light water stone friend"""
_WORDS = _TEXT.split()
#: A grammar, in Lark's notation, of a JSON object with a list of words.
_OBJECT = r"""
start: "{\"name\": \"" /[A-Z][a-z]{1,8}/ "\", \"age\": " /[1-9][0-9]?/ ", \"words\": [" word (", " word){3,60} "]}"
word: "\"" /[a-z]{1,9}/ "\""
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillRequest:
    """One request as a client sends it, or with `cuts` the steps of a tensor session."""

    prompt: tuple[int, ...]
    """Token ids; of a chat those in its record, none before it was read."""
    params: SamplingParams
    """Sampling parameters; `seed` is always set. The grammar of a chat is that in its record."""
    chat: DrillChat | None = None
    """What a client sends instead of the prompt."""
    others: tuple[int, ...] = ()
    """Indexes of the requests to which the further choices of this one's body are equal; none for a single choice."""
    cuts: tuple[int, ...] = ()
    """Position in the prompt up to which each step of a session has tokens."""
    exact: bool = False
    """True if the request keeps off nondeterministic GPUs."""

    @property
    def path(self) -> str:
        """The path to which a client sends the request."""
        return "/v1/completions" if self.chat is None else "/v1/chat/completions"

    def body(self) -> dict[str, Any]:
        """Returns the JSON body of a POST to `path`, without `model` and `stream`."""
        params = self.params if self.chat is None else replace(self.params, grammar="")
        plain = {name: value for name, value in params.to_dict().items() if value not in (None, [], (), "")}
        plain |= {"prompt": list(self.prompt)} if self.chat is None else self.chat.body()
        plain |= {"n": 1 + len(self.others)} if self.others else {}
        return {**plain, "return_token_ids": True, "exact": self.exact}

    def step(self, number: int) -> dict[str, Any]:
        """Returns the fields of tensor step `number`, from 1 to the number of `cuts`, without its session."""
        first = self.cuts[number - 2] if number > 1 else 0
        tokens = {"_tensor_": True, "data": [list(self.prompt[first : self.cuts[number - 1]])]}
        return {"step": number, "logits": "last", "input_tensors": {"input_ids": tokens}, "exact": self.exact}

    def to_dict(self, parts: "Parts") -> dict[str, Any]:
        """Returns the JSON object with which the reference process answers the request alone."""
        if self.cuts:
            return {"prompt": self.prompt, "cuts": self.cuts, "numerics": parts}
        shown = () if self.chat is None else self.chat.shown
        return {"prompt": self.prompt, "params": self.params.to_dict(), "shown": shown, "numerics": parts}

    def recorded(self, record: RequestBody) -> "DrillRequest":
        """Returns a chat with the prompt and the grammar that a gateway made of it; any other request as it is.

        Raises ValueError for a chat whose answer cannot be judged.
        """
        if self.chat is None:
            return self
        if record.reasoning:
            raise ValueError("its answer may reason")
        params = replace(self.params, grammar=SamplingParams.from_dict(record.params).grammar)
        chat = with_record(self.chat, form=record.calls, shown=record.shown)
        return replace(self, prompt=tuple(map(int, record.prompt)), params=params, chat=chat)


class Numerics(NamedTuple):
    """What decides the bits of a worker in a drill."""

    salt: str = ""
    """The setting `inject_numerics`."""
    folder: int = 0
    """Index of its block folder among those of the drill."""


#: The numerics of the new tokens of a request, each with the number of tokens at which the next one takes over; None
#: for the last.
Parts = tuple[tuple[Numerics, int | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceAnswer:
    """The right answer of a request; a tensor session has only `digests`, one for the logits of each step."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    content: str = ""
    """The text before the calls of an answer that may call tools."""
    calls: tuple[Call, ...] = ()
    finish_reason: str = ""
    digests: tuple[str, ...] = ()


_ANSWER = TypeAdapter(ReferenceAnswer)


def make_requests(
    count: int,
    *,
    rng: Random,
    folder: BlockFolder,
    longest_answer: int = LONGEST_ANSWER,
    exact_every: int | None = None,
) -> list[DrillRequest]:
    """Returns `count` random requests: greedy and sampled, short and long; half of the prompts share a beginning.

    Every sixth is a tensor session, a third of the others have penalties, and a quarter follow a grammar where the
    model and this environment can. Where the model has a chat template too, a fifth are chats with tools, whose prompts
    are to be read from their records (`learn`). Two fifths have two or three choices: each behind the first is one more
    request, right behind it. Every `exact_every`-th is exact (None: none). `longest_answer` is in tokens, at least
    SHORTEST_ANSWER.
    """
    model = folder.model
    tokenizer = Tokenizer.from_file(folder.tokenizer_path) if folder.tokenizer_path is not None else None
    longest = min(LONGEST_PROMPT, model.max_position // 2)
    structured = grammars_of(tokenizer, model) is not None
    chats = structured and folder.chat_template() is not None

    def document(tokens: int) -> list[int]:
        if tokenizer is None:
            return [rng.randrange(2, model.vocab_size) for _ in range(tokens)]
        return tokenizer.encode(" ".join(rng.choices(_WORDS, k=tokens)))[:tokens]

    shared = [document(longest) for _ in range(3)]
    requests: list[DrillRequest] = []
    number = 0
    while len(requests) < count:
        length = max(1, int(longest ** rng.random()))
        prompt = document(length)
        if rng.random() < 0.5:
            prompt = (rng.choice(shared)[: rng.randint(1, longest)] + prompt)[:longest]
        greedy = rng.random() < 0.5
        params = SamplingParams(
            max_tokens=min(rng.randint(SHORTEST_ANSWER, longest_answer), model.max_position - len(prompt)),
            temperature=0.0 if greedy else rng.choice((0.3, 0.8, 1.2)),
            top_p=1.0 if greedy else rng.choice((1.0, 0.9)),
            seed=rng.randrange(2**53),
            ignore_eos=rng.random() < 0.8,
        )
        if number % 3 == 1:
            params = replace(params, repetition_penalty=1.1, frequency_penalty=0.4, presence_penalty=-0.2)
        chat = make_chat(rng, _WORDS) if chats and number % 7 in (1, 4) and number % 6 != 5 else None
        if chat is not None:
            prompt, params = [], replace(params, ignore_eos=False, max_tokens=min(params.max_tokens, longest // 2))
        elif number % 4 == 2 and structured:
            params = replace(params, grammar=_OBJECT, ignore_eos=False)
        steps = sorted(rng.sample(range(1, len(prompt) + 1), min(len(prompt), 3))) if number % 6 == 5 else ()
        exact = exact_every is not None and number % exact_every == 0
        several = rng.randint(2, 3) if number % 5 in (1, 3) and not steps else 1
        one = DrillRequest(prompt=tuple(prompt), params=params, cuts=tuple(steps), exact=exact, chat=chat)
        others = range(len(requests) + 1, min(count, len(requests) + several))
        requests.append(replace(one, others=tuple(others)))
        requests += [_choice(one, index) for index in range(1, 1 + len(others))]
        number += 1
    return requests


def _choice(first: DrillRequest, index: int) -> DrillRequest:
    """Returns the request to which choice `index` of the body of `first` is equal, but for the form of its answer."""
    return replace(first, params=replace(first.params, seed=derive_seed(f"{first.params.seed}:{index}")))


def learn(
    requests: list[DrillRequest], record_of: Callable[[DrillRequest], RequestBody], *, only_chats: bool
) -> dict[int, str]:
    """Replaces chats by what their records say, in place. Returns why requests cannot be sent, by their indexes.

    `record_of` sends a request and returns its record; it raises Refused for one that the system does not take, and
    WireError for a record that this release cannot read. `only_chats`: other requests are not sent. A chat that was
    learned before, from another release, must have the same record.
    """
    why: dict[int, str] = {}
    for number, request in enumerate(requests):
        if request.cuts or (only_chats and request.chat is None):
            continue
        try:
            found = request.recorded(record_of(request))
        except (Refused, WireError, ValueError) as error:
            why[number] = str(error)
            continue
        if request.prompt and found != request:
            why[number] = "releases make different prompts or grammars of it"
        requests[number] = found
    whole = {n: next((why[other] for other in one.others if other in why), "") for n, one in enumerate(requests)}
    return {number: reason for number, reason in whole.items() if reason} | why


@dataclass(slots=True)
class References:
    """The right answers to all `requests` by `models`, block folders of one model in several precisions.

    `ids` has what each numerics id that may answer stands for. `prepare` computes answers in other processes; `answer`
    returns them.
    """

    models: Sequence[Path]
    requests: Sequence[DrillRequest]
    ids: Mapping[str, Numerics]
    _known: dict[tuple[int, Parts], ReferenceAnswer] = field(
        default_factory=dict[tuple[int, Parts], ReferenceAnswer], init=False
    )

    def answer(self, number: int, fingerprint: str) -> ReferenceAnswer | None:
        """Returns the right answer to `requests[number]` for a `system_fingerprint`; None for an unknown one.

        Call `prepare` first.
        """
        parts = parts_of(fingerprint, self.ids)
        return None if parts is None else self._known[number, parts]

    def prepare(self, wanted: Iterable[tuple[int, str]]) -> None:
        """Computes the missing answers of these pairs (index in `requests`, fingerprint); skips unknown fingerprints.

        Raises ServiceUnavailable if the process that computes them fails.
        """
        pairs = {(ask, parts) for ask, name in wanted if (parts := parts_of(name, self.ids)) is not None}
        missing = sorted(pairs - self._known.keys(), key=repr)
        if missing:
            questions = [self.requests[ask].to_dict(parts) for ask, parts in missing]
            what = "the requests cannot be answered alone"
            answers = map(_ANSWER.validate_json, asked_alone("reference_answers", self.models, questions, what))
            for (ask, parts), answer in zip(missing, answers, strict=True):
                chat = self.requests[ask].chat
                self._known[ask, parts] = answer if chat is None else _with_calls(answer, chat.form)


def _with_calls(answer: ReferenceAnswer, form: str) -> ReferenceAnswer:
    """Returns the right answer to a chat: its text is cut, and its finish_reason is that of OpenAI's API."""
    content, calls, ends_with_call = cut(answer.text, form)
    reason = "tool_calls" if ends_with_call and answer.finish_reason == "stop" else answer.finish_reason
    return replace(answer, content=content, calls=calls, finish_reason=reason)


def parts_of(fingerprint: str, ids: Mapping[str, Numerics]) -> Parts | None:
    """Returns the numerics of an answer with this fingerprint; None for an unknown one. `ids`: them by numerics id.

    In `a+b@17` numerics a computed the first 17 new tokens, and b the rest.
    """
    names, ends = list[str](), list[int | None]()
    for part in fingerprint.split("+"):
        name, _, start = part.partition("@")
        if name not in ids or start.isdecimal() != bool(names):
            return None
        if names:
            ends.append(int(start))
        names.append(name)
    return tuple(zip((ids[name] for name in names), [*ends, None], strict=True))


def incomplete(request: DrillRequest, tokens: int, finish_reason: str) -> str:
    """Returns the error of an answer that was not complete (it ended too early or too late); "" for none.

    It is for answers whose tokens cannot be computed again.
    """
    if finish_reason not in ("stop", "length", "tool_calls"):
        return f"it ended as {finish_reason!r}"
    limit = request.params.max_tokens
    if tokens > limit or (tokens < limit and (finish_reason == "length" or request.params.ignore_eos)):
        return f"{tokens} tokens, {limit} were asked for, and it ended as {finish_reason!r}"
    return ""


def asked_alone(module: str, models: Sequence[Path], questions: Sequence[Mapping[str, Any]], what: str) -> list[str]:
    """Runs `blockrelay_worker.offline.<module>` on the block folders `models`, and returns the lines of its stdout.

    `questions` go to its stdin, one JSON object per line. Raises ServiceUnavailable, with a message that begins with
    `what`, if the process fails.
    """
    argv = module_command(f"blockrelay_worker.offline.{module}", *models)
    done = run_command(argv, stdin="".join(json.dumps(one) + "\n" for one in questions))
    return done.check(what, unusable=ServiceUnavailable, failed=ServiceUnavailable).splitlines()
