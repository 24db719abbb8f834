"""What was said in a chat, and what of it is sent along with the next turn. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COMMANDS = {
    "/help": "this list",
    "/new": "a new conversation: the model forgets this one",
    "/quit": "end everything; so does the end of the input (Ctrl-D)",
}


def command_of(line: str) -> str | None:
    """The command in a line that is one word after a slash, whether or not there is one of that name; else None."""
    found = re.fullmatch(r"/\w+", line.strip())
    return found and found[0].lower()


def is_beyond_the_context(status: int, error: Mapping[str, Any]) -> bool:
    """Whether a gateway that refused a chat with these fields may take a shorter one."""
    return status == 400 and (error.get("code") == "context_length_exceeded" or error.get("param") == "max_tokens")


def left_out(turns: int, context: int) -> str:
    """The line that says that so many of the oldest turns were not sent along."""
    which = "the oldest turn is" if turns == 1 else f"the {turns} oldest turns are"
    return f"({which} left out: the model's context is {context} tokens)"


@dataclass(slots=True)
class Conversation:
    """Questions and their answers, oldest first."""

    turns: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def messages(self, question: str, *, without: int = 0) -> list[dict[str, str]]:
        """What is sent to ask `question`, without that many of the oldest turns."""
        said = [
            {"role": role, "content": content}
            for turn in self.turns[without:]
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]
        return [*said, {"role": "user", "content": question}]

    def add(self, question: str, answer: str, *, without: int = 0) -> None:
        """The turn was answered; those that were not sent with it are forgotten."""
        self.turns = [*self.turns[without:], (question, answer)]

    def forget(self) -> None:
        """Begin anew."""
        self.turns = []


@dataclass(slots=True)
class Totals:
    """What a chat came to; times in seconds."""

    turns: int = 0
    cancelled: int = 0
    failed: int = 0
    tokens: int = 0
    firsts: list[float] = field(default_factory=list[float])
    _tokens_behind_first: int = 0
    _seconds_behind_first: float = 0.0

    def add(self, *, tokens: int, first_s: float | None, last_s: float | None) -> None:
        """An answer of so many tokens; seconds from the question to its first and its last piece, if it had any."""
        self.turns += 1
        self.tokens += tokens
        if first_s is None or last_s is None:
            return
        self.firsts.append(first_s)
        if last_s > first_s:
            self._tokens_behind_first += tokens - 1
            self._seconds_behind_first += last_s - first_s

    def rows(self) -> dict[str, str]:
        """The summary table. A figure that nothing was measured for is left out."""
        counts = ((self.cancelled, "cancelled"), (self.failed, "failed"))
        others = ", ".join(f"{count} {what}" for count, what in counts if count)
        rows = {"turns": f"{self.turns} ({others})" if others else str(self.turns), "tokens": str(self.tokens)}
        if self._seconds_behind_first:
            rows["tokens per second"] = f"{self._tokens_behind_first / self._seconds_behind_first:.0f}"
        if self.firsts:
            rows["time to first token"] = f"{1000 * sum(self.firsts) / len(self.firsts):.0f} ms on average"
        return rows
