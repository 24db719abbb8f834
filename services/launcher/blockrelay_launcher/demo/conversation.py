"""The turns of a chat, the messages of its next request, and its figures. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from blockrelay_launcher.demo.answer import Answer

COMMANDS = {
    "/help": "this list",
    "/new": "a new conversation: the model forgets this one",
    "/quit": "end everything; so does the end of the input (Ctrl-D)",
}


def command_of(line: str) -> str | None:
    """Returns the command of a line, such as `/help`, in lower case with its slash; None if the line is no command.

    A command is one word after a slash, known or not.
    """
    match = re.fullmatch(r"/\w+", line.strip())
    return match and match[0].lower()


def is_beyond_the_context(status: int, error: Mapping[str, Any]) -> bool:
    """True if a refusal (HTTP `status` and OpenAI's fields of the error) means that the chat is too long."""
    return status == 400 and (error.get("code") == "context_length_exceeded" or error.get("param") == "max_tokens")


def left_out(turns: int, context: int) -> str:
    """Returns the line that tells the user how many of the oldest turns were not sent."""
    which = "the oldest turn is" if turns == 1 else f"the {turns} oldest turns are"
    return f"({which} left out: the model's context is {context} tokens)"


@dataclass(slots=True)
class Conversation:
    """The questions of a chat and their answers, the oldest first."""

    turns: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def messages(self, question: str, *, without: int = 0) -> list[dict[str, str]]:
        """Returns the messages that ask `question`, without the first `without` turns."""
        history = [
            {"role": role, "content": content}
            for turn in self.turns[without:]
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]
        return [*history, {"role": "user", "content": question}]

    def add(self, question: str, answer: str, *, without: int = 0) -> None:
        """Adds an answered turn and drops the first `without` turns, which were not sent with it."""
        self.turns = [*self.turns[without:], (question, answer)]

    def forget(self) -> None:
        """Drops all turns."""
        self.turns = []


@dataclass(slots=True)
class ConversationTotals:
    """The figures of a chat: all answers, the cancelled ones included, and the number of turns without one."""

    answers: list[Answer] = field(default_factory=list[Answer])
    cancelled: int = 0
    failed: int = 0

    def rows(self) -> dict[str, str]:
        """Returns the rows of the summary table; a figure without a measurement is left out."""
        counts = ((self.cancelled, "cancelled"), (self.failed, "failed"))
        others = ", ".join(f"{count} {what}" for count, what in counts if count)
        turns = str(len(self.answers) + self.failed)
        rows = {"turns": f"{turns} ({others})" if others else turns, "tokens": str(sum(a.tokens for a in self.answers))}
        firsts = [answer.first for answer in self.answers if answer.first is not None]
        spans = [(a.tokens - 1, a.last - a.first) for a in self.answers if a.first and a.last and a.last > a.first]
        if spans:
            tokens, seconds = sum(count for count, _ in spans), sum(span for _, span in spans)
            rows["tokens per second"] = f"{tokens / seconds:.0f}"
        if firsts:
            rows["time to first token"] = f"{1000 * fmean(firsts):.0f} ms on average"
        return rows
