"""What a schema costs, and what it saves: `python -m bench.scenarios.structured_output [--model DIR]`.

On one `blockrelay up`, in turns: 16 requests whose answers follow a schema, and as many of about the same length that
follow none. It prints tokens per second of both and their ratio, and steps per token of the first: tokens that the
schema forces need no step of their own. Then 15 requests run alone and beside one whose grammar does as much work in
each step as the limits allow. Last, the time to compile a schema of 2 kB.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.pairs import MODEL, ROOT, Side, running
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.constants import MAX_DRAFTS
from blockrelay.text.grammars import Grammars, GrammarState, grammars_of
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.api.openai.schemas import CompletionRequest
from blockrelay_gateway.api.structured_output import StructuredOutput

REQUESTS = 16
WORDS = ["garden", "kitchen", "hall", "cellar"]
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "place": {"enum": WORDS},
        "is_present": {"type": "boolean"},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 4},
        "remark": {"type": "string", "minLength": 40, "maxLength": 120},
    },
    "required": ["name", "age", "place", "is_present", "friends", "remark"],
    "additionalProperties": False,
}
#: Each line of its texts has many derivations, nearly as many as the limits allow.
HEAVY = (
    'start: (line "\\n")+\nline: part{0,12}\npart: w | w w | w w w\nw: /[a-z]{1,4}/ | /[a-m ]{1,8}/ | /[^0-9\\n]{1,3}/'
)


def wave(side: Side, bodies: Sequence[Mapping[str, Any]]) -> tuple[float, list[list[int]]]:
    """Sends all bodies at once; returns the seconds until all answers were there, and their token ids."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: _tokens(side, body), bodies))
    return time.perf_counter() - began, answers


def _status(side: Side, content: Mapping[str, Any]) -> int:
    return httpx.post(f"{side.url}/v1/completions", json=content, timeout=600, trust_env=False).status_code


def _tokens(side: Side, body: Mapping[str, Any]) -> list[int]:
    answer = httpx.post(f"{side.url}/v1/completions", json=body, timeout=600, trust_env=False)
    return answer.raise_for_status().json()["choices"][0]["token_ids"]


def body(number: int, new: int, **more: Any) -> Mapping[str, Any]:
    prompt = [3 + (at * 7 + number * 13) % 190 for at in range(64)]
    return {
        "prompt": prompt, "max_tokens": new, "temperature": 0.6, "top_p": 0.9, "seed": number, "return_token_ids": True,
        **more,
    }  # fmt: skip


def steps_of(state: GrammarState, tokens: Sequence[int]) -> int:
    """Number of steps for an answer: each gives one token, and those that are forced before it."""
    steps = at = 0
    while at < len(tokens):
        forced = state.forced(MAX_DRAFTS)
        taken = tokens[at : at + len(forced) + 1]
        state.push(taken)
        at += len(taken)
        steps += 1
    return steps


def compare(side: Side, grammars: Grammars, rounds: int) -> None:
    """Measures requests with a schema beside others."""
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    following = [body(number, 400, **form) for number in range(REQUESTS)]
    _, answers = wave(side, following)
    length = round(sum(map(len, answers)) / REQUESTS)
    free = [body(number, length, ignore_eos=True) for number in range(REQUESTS)]
    wave(side, free)
    rates: dict[str, list[float]] = {"schema": [], "free": []}
    for turn in range(rounds):
        for name in ("schema", "free") if turn % 2 else ("free", "schema"):
            seconds, answers = wave(side, following if name == "schema" else free)
            rates[name].append(sum(map(len, answers)) / seconds)
    ratios = [one / other for one, other in zip(rates["schema"], rates["free"], strict=True)]
    print(
        f"{REQUESTS} requests, {length} tokens each: {median(rates['schema']):.0f} tok/s with a schema, "
        f"{median(rates['free']):.0f} without, ratio {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    grammar, _ = StructuredOutput(grammars).grammar_of(CompletionRequest(prompt="a", guided_json=SCHEMA))
    _, answers = wave(side, following)
    steps = [steps_of(grammars.follow(grammar), answer) / len(answer) for answer in answers]
    print(f"steps per token with the schema: {median(steps):.2f} ({min(steps):.2f} to {max(steps):.2f})")


def beside_heavy(side: Side, rounds: int) -> None:
    """Measures 15 requests alone and beside one with a grammar that is as much work as the limits allow."""
    others = [body(number, 200, ignore_eos=True) for number in range(REQUESTS - 1)]
    ratios, status = list[float](), 0
    for _ in range(rounds):
        plain, _ = wave(side, [*others, body(99, 200, ignore_eos=True)])
        with ThreadPoolExecutor(1) as thread:
            heavy = thread.submit(_status, side, body(99, 200, grammar=HEAVY))
            beside, _ = wave(side, others)
            status = heavy.result()
        ratios.append(plain / beside)
    pace = f"{median(ratios):.2f} of their pace beside a plain one"
    print(f"15 requests beside a heavy grammar ({status}): {pace}")


def compile_time(grammars: Grammars) -> None:
    """Measures how long a schema of 2 kB takes to be checked, and to be read by a worker."""
    properties = {f"field_{n}": SCHEMA["properties"]["remark"] if n % 2 else {"enum": WORDS} for n in range(32)}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    times: list[float] = []
    for number in range(20):
        changed = {**schema, "title": str(number)}  # not the one that was checked before
        began = time.perf_counter()
        StructuredOutput(grammars).grammar_of(CompletionRequest(prompt="a", guided_json=changed))
        times.append(time.perf_counter() - began)
    print(f"a schema of {len(json.dumps(schema))} bytes: checked in {1000 * median(times):.1f} ms")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="block folder")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each side")
    given = parser.parse_args(arguments)
    folder = open_block_folder(given.model, blocks=())
    assert folder.tokenizer_path is not None, "it needs a model with a tokenizer"
    grammars = grammars_of(Tokenizer.from_file(folder.tokenizer_path), folder.model)
    assert grammars is not None, "it needs llguidance and a model with end tokens"
    compile_time(grammars)
    with running(ROOT, given.model, (), {}) as side:
        compare(side, grammars, given.rounds)
        beside_heavy(side, given.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
