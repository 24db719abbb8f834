"""Random requests, and what each of them gives alone."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from blockrelay.block_folder import BlockFolder
from blockrelay.errors import ServiceUnavailable
from blockrelay.sampling_params import SamplingParams
from blockrelay.text import Tokenizer

#: Tokens of the longest prompt and of the longest answer; shorter where the model's context is.
LONGEST_PROMPT, LONGEST_ANSWER = 400, 200
_TEXT = """the a fox dog boat garden kite river old small red found gave went saw and then but because was happy story
Lily Ben Molly Tom said again under over into house light water stone friend"""
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request as a client sends it; `params.seed` is given."""

    prompt: tuple[int, ...]
    params: SamplingParams

    def body(self) -> dict[str, Any]:
        """The fields of a completion."""
        plain = {name: value for name, value in self.params.to_dict().items() if value not in (None, [], ())}
        return {**plain, "prompt": list(self.prompt), "return_token_ids": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request gives alone."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str


def make_asks(count: int, *, rng: Random, folder: BlockFolder) -> list[Ask]:
    """Greedy and sampled, short and long; half of the prompts begin like others."""
    model = folder.model
    tokenizer = Tokenizer.from_file(folder.tokenizer_path) if folder.tokenizer_path is not None else None
    longest = min(LONGEST_PROMPT, model.max_position // 2)

    def document(tokens: int) -> list[int]:
        if tokenizer is None:
            return [rng.randrange(2, model.vocab_size) for _ in range(tokens)]
        return tokenizer.encode(" ".join(rng.choices(_WORDS, k=tokens)))[:tokens]

    shared = [document(longest) for _ in range(3)]
    asks: list[Ask] = []
    for _ in range(count):
        length = max(1, int(longest ** rng.random()))
        prompt = document(length)
        if rng.random() < 0.5:
            prompt = (rng.choice(shared)[: rng.randint(1, longest)] + prompt)[:longest]
        greedy = rng.random() < 0.5
        params = SamplingParams(
            max_tokens=min(rng.randint(4, LONGEST_ANSWER), model.max_position - len(prompt)),
            temperature=0.0 if greedy else rng.choice((0.3, 0.8, 1.2)),
            top_p=1.0 if greedy else rng.choice((1.0, 0.9)),
            seed=rng.randrange(2**53),
            ignore_eos=rng.random() < 0.8,
        )
        asks.append(Ask(prompt=tuple(prompt), params=params))
    return asks


def answers_alone(model: Path, asks: Sequence[Ask]) -> list[Answer]:
    """In a fresh process, one after the other. Raises ServiceUnavailable when that process fails."""
    lines = "".join(json.dumps({"prompt": a.prompt, "params": a.params.to_dict()}) + "\n" for a in asks)
    argv = [sys.executable, "-P", "-m", "blockrelay_worker.solo", str(model)]
    done = subprocess.run(argv, input=lines, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServiceUnavailable(f"the requests cannot be answered alone: {done.stderr.strip().splitlines()[-1:]}")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [Answer(tokens=tuple(one["tokens"]), text=one["text"], finish_reason=one["finish_reason"]) for one in found]
