"""Whether grammars obey JSON Schema: runs the JSON-Schema-Test-Suite: `python -m tests.parity.json_schemas ARCHIVE`.

ARCHIVE is the source distribution of the package jsonschema, which holds the suite; `make schemas` fetches it. A schema
is either refused by name, or no text that it does not allow may pass. It prints the table of docs/json-schema.md, which
`--publish` writes; without that, a table that differs from the page is an error, as is a wrong text that passes.
"""

import argparse
import json
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import BadRequest
from blockrelay.text.grammars import Grammars, grammars_of
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.api.openai.schemas import CompletionRequest
from blockrelay_gateway.api.structured_output import StructuredOutput
from tests.support.project import ROOT

PAGE = ROOT / "docs/json-schema.md"
#: A wrong text that stays: regular expressions are those of Rust, whose whitespace has no byte order mark.
KNOWN = ("zero-width whitespace does not match",)
#: What errors mean, by some of their words.
MEANINGS = {
    "Resource": "a reference to another document",
    "Unsatisfiable": "no text fits",
    "oneOf": "`oneOf` whose parts overlap",
    "patternProperty": "`patternProperties` that overlap",
    "an object": "the schema `false`",
    "no token may follow": "a schema that contains itself without end",
}
DRAFT = "/json/tests/draft2020-12/"
AT_LEAST = 400
"""Fewer schemas mean that the archive is another one than it was."""
HEAD = """\
# JSON schemas

For people whose requests have a `response_format`, and who ask which keywords it takes.

What is accepted is obeyed: the [JSON-Schema-Test-Suite](https://github.com/json-schema-org/JSON-Schema-Test-Suite)
(draft 2020-12) has schemas with texts that fit and texts that do not. Each schema is accepted, or refused with a line
that names what is not supported. "Wrong" counts the texts that do not fit and could be written all the same; "never
written" those that fit and are not written, such as `1.0` for the constant `1`. Regular expressions are those of Rust's
library `regex`. `make schemas` makes this table, and fails on a wrong text.

"""


@dataclass(slots=True)
class Outcome:
    """What became of the schemas of one file of the suite."""

    accepted: int = 0
    refused: int = 0
    never: int = 0
    wrong: list[str] = field(default_factory=list[str])
    reasons: Counter[str] = field(default_factory=Counter[str])


def cases(archive: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the name and the schemas, with their texts, of each file of the suite."""
    with tarfile.open(archive) as files:
        for member in sorted(files.getmembers(), key=lambda one: one.name):
            content = files.extractfile(member) if DRAFT in member.name and member.name.endswith(".json") else None
            if content is not None:
                yield member.name.partition(DRAFT)[2].removesuffix(".json"), json.load(content)


def reasons(error: str) -> list[str]:
    """Returns for what a schema was refused: each keyword or format that is not supported, or another reason."""
    if "Unimplemented keys" in error:
        return [f"keyword `{key}`" for key in json.loads(error[error.index("[") : error.index("]") + 1])]
    if "Unknown format: " in error:
        return [f"format `{error.rpartition(': ')[2]}`"]
    found = [meaning for words, meaning in MEANINGS.items() if words in error]
    return found[:1] or ["numbers, regular expressions and other forms that llguidance does not read"]


def judged(schemas: Sequence[dict[str, Any]], tokenizer: Tokenizer, grammars: Grammars) -> Outcome:
    """Returns what becomes of the schemas of one file."""
    structured, found = StructuredOutput(grammars), Outcome()
    for one in schemas:
        try:
            grammar, _ = structured.grammar_of(CompletionRequest(prompt="a", guided_json=one["schema"]))
        except BadRequest as error:
            found.refused += 1
            found.reasons.update(reasons(str(error)))
            continue
        found.accepted += 1
        for test in one["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False)
            passes = grammars.follow(grammar).takes(tokenizer.encode(text, add_special_tokens=False))
            if passes and not test["valid"] and not any(known in test["description"] for known in KNOWN):
                found.wrong.append(f"{one['description']}, {test['description']}: {text}")
            found.never += test["valid"] and not passes
    return found


def table(outcomes: dict[str, Outcome]) -> str:
    lines = ["| file | accepted | refused | wrong | never written |", "|---|---|---|---|---|"]
    for name, one in outcomes.items():
        lines.append(f"| `{name}` | {one.accepted} | {one.refused} | {len(one.wrong)} | {one.never} |")
    every = outcomes.values()
    sums = [
        sum(counts) for counts in zip(*((o.accepted, o.refused, len(o.wrong), o.never) for o in every), strict=True)
    ]
    lines.append(f"| all | {' | '.join(map(str, sums))} |")
    every_reason = sum((one.reasons for one in every), Counter[str]())
    lines += ["", "Refused are schemas with:", "", "| what | schemas |", "|---|---|"]
    lines += [
        f"| {reason} | {count} |" for reason, count in sorted(every_reason.items(), key=lambda one: (-one[1], one[0]))
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--publish", action="store_true", help="write docs/json-schema.md")
    given = parser.parse_args(arguments)
    folder = open_block_folder(ROOT / "shared/blockrelay/models/storyteller", blocks=())
    assert folder.tokenizer_path is not None
    tokenizer = Tokenizer.from_file(folder.tokenizer_path)
    grammars = grammars_of(tokenizer, folder.model)
    assert grammars is not None
    outcomes = {name: judged(schemas, tokenizer, grammars) for name, schemas in cases(given.archive)}
    page = HEAD + table(outcomes)
    print(table(outcomes))
    wrong = [f"{name}: {text}" for name, one in outcomes.items() for text in one.wrong]
    for line in wrong:
        print(f"WRONG {line}")
    if sum(one.accepted + one.refused for one in outcomes.values()) < AT_LEAST:
        print(f"the archive has fewer than {AT_LEAST} schemas")
        return 1
    if given.publish:
        PAGE.write_text(page)
    elif not PAGE.is_file() or PAGE.read_text() != page:
        print(f"{PAGE.name} is not what the suite gives now: run with --publish")
        return 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
