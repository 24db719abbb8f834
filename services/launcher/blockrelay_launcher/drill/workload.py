"""Random requests, and what each of them gives alone, by every numerics id that there is."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import ServiceUnavailable
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_launcher.drill.options import LONGEST_ANSWER, SHORTEST_ANSWER

#: Tokens of the longest prompt; shorter where the model's context is.
LONGEST_PROMPT = 400
_TEXT = """the a fox dog boat garden kite river old small red found gave went saw and then but because was happy story
Lily Ben Molly Tom said again under over into house light water stone friend"""
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request as a client sends it; `params.seed` is given.

    With `cuts` it is the steps of a tensor session instead, each with the tokens up to its cut. An `exact` one keeps
    off GPUs that do not compute the same bits twice.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    cuts: tuple[int, ...] = ()
    exact: bool = False

    def body(self) -> dict[str, Any]:
        """The fields of a completion."""
        plain = {name: value for name, value in self.params.to_dict().items() if value not in (None, [], ())}
        return {**plain, "prompt": list(self.prompt), "return_token_ids": True, "exact": self.exact}

    def step(self, number: int) -> dict[str, Any]:
        """The fields of tensor step `number`, from 1, without its session."""
        first = self.cuts[number - 2] if number > 1 else 0
        tokens = {"_tensor_": True, "data": [list(self.prompt[first : self.cuts[number - 1]])]}
        return {"step": number, "logits": "last", "input_tensors": {"input_ids": tokens}, "exact": self.exact}

    def to_dict(self, parts: "Parts") -> dict[str, Any]:
        """For the process that answers it alone."""
        if self.cuts:
            return {"prompt": self.prompt, "cuts": self.cuts, "salts": parts}
        return {"prompt": self.prompt, "params": self.params.to_dict(), "salts": parts}


#: Who computes the new tokens of a request: salts of numerics ("" without one), each with the number of tokens at which
#: the next one takes over; None for the last.
Parts = tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request gives alone; of a tensor session only `digests`, one for the logits of each step."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""
    digests: tuple[str, ...] = ()


def make_asks(
    count: int,
    *,
    rng: Random,
    folder: BlockFolder,
    longest_answer: int = LONGEST_ANSWER,
    exact_every: int | None = None,
) -> list[Ask]:
    """Greedy and sampled, short and long; half of the prompts begin like others. Every sixth is a tensor session, and
    every so many are `exact`. `longest_answer` in tokens, at least SHORTEST_ANSWER."""
    model = folder.model
    tokenizer = Tokenizer.from_file(folder.tokenizer_path) if folder.tokenizer_path is not None else None
    longest = min(LONGEST_PROMPT, model.max_position // 2)

    def document(tokens: int) -> list[int]:
        if tokenizer is None:
            return [rng.randrange(2, model.vocab_size) for _ in range(tokens)]
        return tokenizer.encode(" ".join(rng.choices(_WORDS, k=tokens)))[:tokens]

    shared = [document(longest) for _ in range(3)]
    asks: list[Ask] = []
    for number in range(count):
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
        steps = sorted(rng.sample(range(1, len(prompt) + 1), min(len(prompt), 3))) if number % 6 == 5 else ()
        exact = exact_every is not None and number % exact_every == 0
        asks.append(Ask(prompt=tuple(prompt), params=params, cuts=tuple(steps), exact=exact))
    return asks


@dataclass(slots=True)
class References:
    """What each ask gives alone. `ids` has the salt of each numerics id that may answer; the first one is made before
    anything is asked, whatever else turns out to be needed by `prepare`."""

    model: Path
    asks: Sequence[Ask]
    ids: Mapping[str, str]
    _known: dict[tuple[int, Parts], Answer] = field(default_factory=dict[tuple[int, Parts], Answer], init=False)

    def answer(self, ask: int, fingerprint: str) -> Answer | None:
        """Of ask number `ask` by what a `system_fingerprint` names; None when it names nobody known. Call `prepare`
        first."""
        parts = parts_of(fingerprint, self.ids)
        return None if parts is None else self._known[ask, parts]

    def prepare(self, wanted: Iterable[tuple[int, str]]) -> None:
        """Compute what is missing of these (ask, fingerprint). Raises ServiceUnavailable."""
        found = {(ask, parts) for ask, name in wanted if (parts := parts_of(name, self.ids)) is not None}
        missing = sorted(found - self._known.keys(), key=repr)
        if missing:
            answers = answers_alone(self.model, [(self.asks[ask], parts) for ask, parts in missing])
            self._known.update(zip(missing, answers, strict=True))


def parts_of(fingerprint: str, ids: Mapping[str, str]) -> Parts | None:
    """Who computed an answer with this fingerprint, None for somebody unknown. `ids`: salt by numerics id.

    `a+b@17`: the first 17 new tokens are a's, the rest b's.
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


def incomplete(ask: Ask, tokens: int, finish_reason: str) -> str:
    """What is wrong with an answer whose tokens nobody could compute again: it ends too early; "" for nothing."""
    if finish_reason not in ("stop", "length"):
        return f"it ended as {finish_reason!r}"
    most = ask.params.max_tokens
    if tokens > most or (tokens < most and (finish_reason == "length" or ask.params.ignore_eos)):
        return f"{tokens} tokens, {most} were asked for, and it ended as {finish_reason!r}"
    return ""


def answers_alone(model: Path, asks: Sequence[tuple[Ask, Parts]]) -> list[Answer]:
    """In a fresh process, one after the other. Raises ServiceUnavailable when that process fails."""
    lines = "".join(json.dumps(ask.to_dict(parts)) + "\n" for ask, parts in asks)
    argv = [sys.executable, "-P", "-m", "blockrelay_worker.offline.reference_answers", str(model)]
    done = subprocess.run(argv, input=lines, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServiceUnavailable(f"the requests cannot be answered alone: {done.stderr.strip().splitlines()[-1:]}")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [Answer(**{name: _frozen(value) for name, value in one.items()}) for one in found]


def _frozen(value: Any) -> Any:
    return tuple(cast(list[Any], value)) if isinstance(value, list) else value
