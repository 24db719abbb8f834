"""The grammar of an answer that calls tools, in llguidance's dialect of Lark. Pure."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from blockrelay.text.grammars import Grammars
from blockrelay_gateway.api.openai.tools.formats import MARKS, CallForm

_MARK = re.compile("|".join(map(re.escape, MARKS)))


def grammar_of_calls(
    form: CallForm,
    functions: Mapping[str, str],
    grammars: Grammars,
    *,
    required: bool,
    several: bool,
    answer: str = "",
) -> str:
    """Returns the grammar of answers that call `functions`: JSON schemas of their arguments, by name.

    If calls are `required` the answer begins with one, else with any text, which calls may follow. With a JSON schema
    `answer` it is either calls or JSON that fits, and `form` is one `beside_json`. `several`: more than one call is
    allowed. No text but a call's contains the form's trigger, except in JSON.
    """

    def written(text: str) -> str:
        """Returns `text` in Lark's notation: quoted, but for special tokens."""
        return " ".join(grammars.symbol(part) or json.dumps(part) for part in _parts(text))

    rules = list[str]()
    for index, (name, schema) in enumerate(functions.items()):
        head = written(form.before_name + name + form.before_arguments)
        rules += [f"call_{index}: {head} arguments_{index} {written(form.after_arguments)}"]
        rules += [f"arguments_{index}: %json {schema}"]
    more = f"({written(form.separator)} call)*" if several else ""
    rules += ["call: " + " | ".join(f"call_{index}" for index in range(len(functions)))]
    rules += [f"calls: {form.opening} call {more} {written(form.closing)}"]
    begun = written(form.trigger)
    if required:
        return "\n".join([f"start: {'' if form.braced else begun} calls", *rules])
    if answer:
        return "\n".join([f"start: {begun} calls | answer", f"answer: %json {answer}", *rules])
    return "\n".join([*_beginning(form, begun, grammars), *rules])


def _beginning(form: CallForm, begun: str, grammars: Grammars) -> list[str]:
    """Returns the rules of an answer that may be text, text and calls, or calls; `begun` is the trigger in Lark."""
    trigger, is_token = re.escape(form.trigger), grammars.symbol(form.trigger) is not None
    spoken = _ranges(grammars.unquoted(form.trigger))
    # Two WORDS never follow each other: together they could spell the trigger, of which neither has all.
    more = f" (<[{spoken}]> WORDS?)*" if spoken else ""
    if form.leading:  # the first character decides
        mark = f"({begun})?" if is_token else ""
        return [
            f"start: {mark} calls | FIRST?{more}",
            f"FIRST: /[^{{\\s](.|\\n)*/ & ~/{trigger}(.|\\n)*/",
            *([r"WORDS: /(.|\n)+/"] if more else []),
        ]
    words = [f"words: WORDS?{more}", f"WORDS: /(.|\\n)+/ & ~/(.|\\n)*{trigger}(.|\\n)*/"]
    if is_token:
        return [f"start: words ({begun} calls)?", *words]
    # A lazy rule ends where the trigger ends; behind it nothing but a call can follow.
    return ["start: words (head calls)?", *words, f"head[lazy]: /(.|\\n)*{trigger}/"]


def _ranges(tokens: Sequence[int]) -> str:
    """Returns sorted token ids as Lark writes them: `3,7-9`."""
    found = list[list[int]]()
    for token in tokens:
        if found and found[-1][1] == token - 1:
            found[-1][1] = token
        else:
            found.append([token, token])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _parts(text: str) -> Iterable[str]:
    """Yields the marks in `text`, and what is between them."""
    at = 0
    for mark in _MARK.finditer(text):
        if mark.start() > at:
            yield text[at : mark.start()]
        yield mark[0]
        at = mark.end()
    if at < len(text):
        yield text[at:]
