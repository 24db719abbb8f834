"""Random requests that share prefixes, repeat themselves and end in every way: one seed, one workload."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.tokenizer import Tokenizer

#: Longest prompt; with the longest answer it stays inside the bundled model's context of 1024.
LONGEST_PROMPT = 600
LONGEST_ANSWER = 160

_NAMES = ("Lily", "Ben", "Molly", "Felix", "Tom", "Rosa")
_THINGS = ("a red ball", "a small boat", "an old key", "a blue kite", "a warm cake", "a round stone")
_PLACES = ("the garden", "the forest", "the beach", "the kitchen", "the old barn", "the river")
_SENTENCES = (
    "{name} found {thing} in {place}.",
    "{name} gave {thing} to {other}.",
    "Then {name} and {other} went to {place}.",
    '"Look, {thing}!" said {name}.',
    "{other} was happy, and {name} was happy too.",
    "One day {name} was in {place} with {other}.",
)
_STOPS = (" the", ".", " and", "\n", " was happy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request as a client sends it; `params.seed` is given. `tensor`: all logits of the prompt, and no token."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    stream: bool = False
    tensor: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the process that answers it alone."""
        return {"prompt": list(self.prompt), "params": self.params.to_dict(), "tensor": self.tensor}


def make_workload(count: int, *, seed: int, tokenizer: Tokenizer, vocab: int) -> list[Asked]:
    """`count` requests with prompts of 1 to LONGEST_PROMPT tokens, both ends among them.

    Half of the prompts begin with one of a few long documents, cut anywhere (whole pages, one token more or less, the
    whole document). Texts say things twice, so that looking up what followed last time guesses right now and then;
    every tenth prompt is noise. Every second request is greedy.
    """
    rng = np.random.default_rng(seed)
    documents = [tokenizer.encode(_document(rng))[:LONGEST_PROMPT] for _ in range(4)]
    asks = [_asked(rng, f"asked-{seed}-{i}", documents, tokenizer, vocab) for i in range(count)]
    longest = tuple(documents[0] * LONGEST_PROMPT)[:LONGEST_PROMPT]
    return [replace(asks[0], prompt=longest[:1]), replace(asks[1], prompt=longest, tensor=False), *asks[2:]]


def _asked(rng: np.random.Generator, name: str, documents: list[list[int]], tokenizer: Tokenizer, vocab: int) -> Asked:
    kind = rng.random()
    if kind < 0.1:
        prompt = rng.integers(2, vocab, _length(rng)).tolist()
    else:
        prompt = tokenizer.encode(_document(rng))[: _length(rng)]
        if kind < 0.6:
            shared = documents[rng.integers(len(documents))]
            cut = int(rng.choice([16 * rng.integers(1, 1 + len(shared) // 16), rng.integers(1, 1 + len(shared))]))
            prompt = shared[: cut + int(rng.integers(-1, 2))] + prompt[: rng.choice([0, 1, 15, 16, 17, 60])]
    prompt = prompt[:LONGEST_PROMPT]
    return Asked(
        name=name,
        prompt=tuple(int(token) for token in prompt),
        params=_params(rng),
        stream=bool(rng.random() < 0.4),
        tensor=bool(rng.random() < 0.08 and len(prompt) <= 200),
    )


def _length(rng: np.random.Generator) -> int:
    """1 to LONGEST_PROMPT, short ones as likely as long ones; often at a page's edge."""
    length = int(np.exp(rng.uniform(0, np.log(LONGEST_PROMPT + 1))))
    return min(LONGEST_PROMPT, length if rng.random() < 0.7 else max(1, length // 16 * 16 + int(rng.integers(-1, 2))))


def _params(rng: np.random.Generator) -> SamplingParams:
    greedy = rng.random() < 0.5
    new_tokens = (1, 2, int(rng.integers(3, 40)), int(rng.integers(40, LONGEST_ANSWER + 1)))
    stops = rng.choice(_STOPS, rng.integers(1, 3), replace=False) if rng.random() < 0.2 else ()
    return SamplingParams(
        max_tokens=int(rng.choice(new_tokens, p=(0.1, 0.1, 0.4, 0.4))),
        temperature=0.0 if greedy else float(rng.choice([0.2, 0.7, 1.0, 1.6])),
        top_k=int(rng.choice([0, 0, 1, 5, 40])),
        top_p=float(rng.choice([1.0, 1.0, 0.9, 0.5])),
        min_p=float(rng.choice([0.0, 0.0, 0.05])),
        seed=int(rng.integers(2**53)),
        stop=tuple(str(text) for text in stops),
        stop_token_ids=tuple(int(token) for token in rng.integers(2, 400, 3)) if rng.random() < 0.1 else (),
        ignore_eos=bool(rng.random() < 0.7),
        logprobs=int(rng.integers(0, 6)) if rng.random() < 0.2 else None,
    )


def _document(rng: np.random.Generator) -> str:
    """Some sentences about few people and things, then the same again in part."""
    names, things, places = (rng.choice(words, 2, replace=False) for words in (_NAMES, _THINGS, _PLACES))
    said: list[str] = []
    for _ in range(rng.integers(2, 40)):
        sentence = _SENTENCES[rng.integers(len(_SENTENCES))]
        first, second = rng.permutation(names)
        said.append(sentence.format(name=first, other=second, thing=rng.choice(things), place=rng.choice(places)))
    return " ".join(said + said[: rng.integers(1, 1 + len(said))])
