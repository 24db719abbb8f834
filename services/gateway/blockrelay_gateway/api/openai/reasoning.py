"""What reasoning models write between `<think>` and `</think>` before they answer. Pure.

A cutter is a function of the text so far: however the text is divided, its pieces joined are the same.
"""

from enum import Enum, auto

from blockrelay.text.marks import possible_start

OPEN, CLOSE = "<think>", "</think>"
#: Values of `RequestBody.reasoning` beside "": the answer may begin with OPEN, or the prompt has it already.
MAY_BEGIN, BEGUN = "may_begin", "begun"
#: Tokens at the end of a prompt among which OPEN or CLOSE is found.
TAIL_TOKENS = 16


def is_shown(template: str) -> bool:
    """Returns whether the model of a chat `template` reasons in this form."""
    return CLOSE in template


def behind_prompt(prompt: str) -> str:
    """Returns the reasoning of the answer to a `prompt` at whose end the assistant's turn begins."""
    end = prompt.rstrip()
    if end.endswith(CLOSE):  # a template leaves no room for reasoning so
        return ""
    return BEGUN if end.endswith(OPEN) else MAY_BEGIN


def within(message: str) -> str:
    """Returns the reasoning of an answer that continues the assistant's `message`."""
    return BEGUN if message.rfind(OPEN) > message.rfind(CLOSE) else ""


class _Place(Enum):
    BEFORE = auto()
    REASONING = auto()
    BEHIND = auto()
    ANSWER = auto()


class ReasoningCutter:
    """Cuts the text of one answer, piece by piece. Blanks at the ends of the reasoning belong to neither part."""

    def __init__(self, reasoning: str, trigger: str = "") -> None:
        """`reasoning` is the request's, MAY_BEGIN or BEGUN. A `trigger`, behind which calls follow, ends it too."""
        self._trigger = trigger
        #: Whether the answer has reasoning, perhaps an empty one, as far as the text so far says.
        self.has_begun = reasoning == BEGUN
        self._place = _Place.REASONING if reasoning == BEGUN else _Place.BEFORE
        self._pending, self._has_reasoning = "", False

    def push(self, text: str) -> tuple[str, str]:
        """Returns what is certain with the next `text`: the next of the reasoning, and of the answer behind it."""
        self._pending += text
        reasoning = ""
        if self._place is _Place.BEFORE:
            self._begin()
        if self._place is _Place.REASONING:
            reasoning = self._reasoning()
        if self._place is _Place.BEHIND:
            self._pending = self._pending.lstrip()
            if self._pending:
                self._place = _Place.ANSWER
        return reasoning, self._take(len(self._pending)) if self._place is _Place.ANSWER else ""

    def finish(self) -> tuple[str, str]:
        """Returns the rest of both parts, at the end of the answer. Called once."""
        rest = self._take(len(self._pending))
        return (rest.rstrip(), "") if self._place is _Place.REASONING else ("", rest)

    def _begin(self) -> None:
        """Decides by the first characters whether the answer has reasoning."""
        begun = self._pending.lstrip()
        if begun.startswith(OPEN):
            self._pending, self._place, self.has_begun = begun[len(OPEN) :], _Place.REASONING, True
        elif not OPEN.startswith(begun):
            self._place = _Place.ANSWER

    def _reasoning(self) -> str:
        """Takes what is reasoning for certain: neither CLOSE nor blanks before it."""
        if not self._has_reasoning:
            self._pending = self._pending.lstrip()
        pending, marks = self._pending, [mark for mark in (CLOSE, self._trigger) if mark]
        found = min(((at, mark) for mark in marks if (at := pending.find(mark)) >= 0), default=None)
        held = possible_start(pending, marks)
        certain = pending[: len(pending) - held if found is None else found[0]].rstrip()
        self._has_reasoning = self._has_reasoning or bool(certain)
        self._take(len(certain))
        if found is not None:
            at, mark = found
            self._pending, self._place = pending[at + len(CLOSE) if mark == CLOSE else at :], _Place.BEHIND
        return certain

    def _take(self, length: int) -> str:
        taken, self._pending = self._pending[:length], self._pending[length:]
        return taken
