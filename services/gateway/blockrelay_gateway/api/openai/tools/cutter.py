"""Cuts the text of an answer into what precedes its tool calls, and the calls. Pure.

A cutter is a function of the text so far: however the text is divided, its pieces joined are the same.
"""

from dataclasses import dataclass
from enum import Enum, auto

from blockrelay.text.marks import possible_start
from blockrelay_gateway.api.openai.tools.formats import CallForm


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: of its content, or of one call."""

    text: str
    """A piece of the content or, of a call, of its arguments, as the model wrote them."""
    call: int | None = None
    """Index of the call; None: the piece is content."""
    name: str = ""
    """The function that is called, in the first piece of each call."""
    is_reasoning: bool = False
    """A piece of the reasoning before the content, and of no call."""


class _Place(Enum):
    CONTENT = auto()
    BETWEEN = auto()
    ARGUMENTS = auto()


class CallCutter:
    """Cuts the text of one answer, piece by piece."""

    def __init__(self, form: CallForm) -> None:
        """`form` is the one that the grammar of the answer has."""
        self._form, self._place, self._pending = form, _Place.CONTENT, ""
        self._has_content = False
        self._calls = self._depth = 0
        self._in_text = self._escaped = False

    @property
    def is_whole(self) -> bool:
        """Whether there are calls, and the last one has all its arguments."""
        return self._calls > 0 and self._place is _Place.BETWEEN

    def push(self, text: str) -> list[Piece]:
        """Returns what is certain with the next `text`."""
        self._pending += text
        found = list[Piece]()
        moved = True
        while moved:
            match self._place:
                case _Place.CONTENT:
                    moved = self._leading(found) if self._form.leading else self._content(found)
                case _Place.BETWEEN:
                    moved = self._head(found)
                case _Place.ARGUMENTS:
                    moved = self._arguments(found)
        return found

    def finish(self) -> list[Piece]:
        """Returns the rest, at the end of the answer. Called once."""
        rest, self._pending = self._pending, ""
        return [Piece(rest)] if rest and self._place is _Place.CONTENT else []

    def _leading(self, found: list[Piece]) -> bool:
        """Decides by the beginning of the answer. Returns whether there is more to cut."""
        pending, trigger = self._pending, self._form.trigger
        if not self._has_content:
            if pending.startswith(("{", trigger) if self._form.braced else trigger):
                self._place = _Place.BETWEEN
                return True
            if trigger.startswith(pending):
                return False
        self._give(found, len(pending))
        return False

    def _content(self, found: list[Piece]) -> bool:
        """Gives what is content for certain: neither the trigger nor blanks before it. Returns whether it was found."""
        pending, trigger = self._pending, self._form.trigger
        if (at := pending.find(trigger)) >= 0:
            self._give(found, len(pending[:at].rstrip()))
            self._pending, self._place = pending[at + len(trigger) :], _Place.BETWEEN
            return True
        self._give(found, len(pending[: len(pending) - possible_start(pending, [trigger])].rstrip()))
        return False

    def _give(self, found: list[Piece], length: int) -> None:
        if length:
            self._has_content = True
            found.append(Piece(self._pending[:length]))
            self._pending = self._pending[length:]

    def _head(self, found: list[Piece]) -> bool:
        """Begins the next call once its name is whole. Returns whether one began."""
        head = self._form.head.search(self._pending)
        if head is None:
            return False
        found.append(Piece("", self._calls, head[1]))
        self._calls += 1
        self._pending, self._place = self._pending[head.end() :], _Place.ARGUMENTS
        return True

    def _arguments(self, found: list[Piece]) -> bool:
        """Gives arguments, which end where their first brace is closed. Returns whether they ended."""
        length, ended = 0, False
        for length, character in enumerate(self._pending, 1):  # noqa: B007 - it is used behind the loop
            if self._escaped:
                self._escaped = False
            elif self._in_text:
                self._escaped, self._in_text = character == "\\", character != '"'
            elif character == '"':
                self._in_text = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if ended := self._depth == 0:
                    break
        if length:
            found.append(Piece(self._pending[:length], self._calls - 1))
            self._pending = self._pending[length:]
        if ended:
            self._place = _Place.BETWEEN
        return ended
