"""Runs `blockrelay demo --interactive`: a chat whose turns are the lines of stdin, with streamed answers."""

import contextlib
import importlib
import io
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console

from blockrelay.block_folder.manifest import Manifest
from blockrelay.errors import ServiceUnavailable
from blockrelay.exit_codes import complain
from blockrelay_launcher.background import running_up
from blockrelay_launcher.client.resuming import Refused
from blockrelay_launcher.demo.answer import (
    Answer,
    cancel,
    error_fields,
    http_client,
    one_line,
    request_body,
    streamed,
    write,
)
from blockrelay_launcher.demo.conversation import (
    COMMANDS,
    Conversation,
    ConversationTotals,
    command_of,
    is_beyond_the_context,
    left_out,
)
from blockrelay_launcher.demo.interrupts import Interrupts
from blockrelay_launcher.tables import facts_table


def run_interactive(model: Path, manifest: Manifest, *, stages: int) -> int:
    """Runs the chat to its end and returns the exit code, which is 0: an error is printed and ends only its turn.

    `model` is the block folder of `manifest` and must have a chat template; it is served in `stages` stages. Only for
    the main thread, because it handles Ctrl-C. Raises ServiceUnavailable if the system does not start.
    """
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # gives input() a history and editing keys
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with running_up(model, stages, apart=True) as url, http_client() as http:
        _say(f"{manifest.model.name} is ready: every line is a turn; /help lists the commands, /quit ends.")
        with Interrupts() as interrupts:
            chat = _Chat(url, http, manifest, interrupts, terminal)
            chat.run()
    Console().print(facts_table("what it took", chat.totals.rows()))
    return 0


def _say(text: str) -> None:
    write(f"{text}\n")


@dataclass(slots=True)
class _Chat:
    """A chat with one gateway: its conversation and figures."""

    url: str
    http: httpx.Client
    manifest: Manifest
    interrupts: Interrupts
    terminal: bool
    conversation: Conversation = field(default_factory=Conversation, init=False)
    totals: ConversationTotals = field(default_factory=ConversationTotals, init=False)

    def run(self) -> None:
        """Reads and answers turns until the end of the input, /quit, or Ctrl-C between answers."""
        while (line := self._read()) is not None:
            command = command_of(line)
            if command == "/quit":
                return
            if command == "/new":
                self.conversation.forget()
                _say("(a new conversation)")
            elif command == "/help":
                _say("\n".join(f"{name:6} {meaning}" for name, meaning in COMMANDS.items()))
            elif command is not None:
                _say(f"({command} is no command: /help lists them)")
            elif line.strip():
                self._turn(line.strip())

    def _read(self) -> str | None:
        """Returns the next line, or None at the end of the input and at Ctrl-C."""
        self.interrupts.forget()  # a Ctrl-C that came as an answer ended was meant for it
        try:
            with self.interrupts.allowed():
                if self.terminal:
                    return input("> ")
                return sys.stdin.readline() or None
        except (EOFError, KeyboardInterrupt):
            if self.terminal:
                _say("")
            return None

    def _turn(self, question: str) -> None:
        """Answers a question, with as many of the last turns as leave room for a whole answer in the context."""
        for forgotten in range(len(self.conversation.turns) + 1):
            fewer = forgotten < len(self.conversation.turns)
            try:
                if self._ask(question, forgotten, whole=fewer):
                    return
            except Refused as refused:
                if not (fewer and is_beyond_the_context(refused.status, error_fields(refused))):
                    return self._fail(refused)
            except (ServiceUnavailable, httpx.HTTPError) as error:
                return self._fail(error)

    def _ask(self, question: str, forgotten: int, *, whole: bool) -> bool:
        """Streams the answer until its end or Ctrl-C, without the first `forgotten` turns.

        Returns False, with nothing printed, if `whole` and the context has no room for a whole answer.
        """
        body = request_body(self.manifest, {"messages": self.conversation.messages(question, without=forgotten)})
        answer, cancelled = Answer(time.monotonic()), False
        try:
            with self.interrupts.allowed(), contextlib.closing(streamed(self.http, self.url, body, answer)) as pieces:
                for piece in pieces:
                    if whole and answer.max_tokens < body["max_tokens"]:
                        cancel(self.http, self.url, answer)
                        return False
                    write(piece)
        except KeyboardInterrupt:
            cancelled = True
            cancel(self.http, self.url, answer)
        except (Refused, ServiceUnavailable, httpx.HTTPError):
            if answer.text:
                _say("")
            raise
        _say(" (cancelled)" if cancelled else "")
        if forgotten:
            _say(left_out(forgotten, self.manifest.model.max_position))
        self.totals.cancelled += cancelled
        self.totals.answers.append(answer)
        if answer.text or not cancelled:
            self.conversation.add(question, answer.text, without=forgotten)
        return True

    def _fail(self, error: Exception) -> None:
        """Prints the error of a turn, which does not become part of the conversation."""
        self.totals.failed += 1
        complain(one_line(error))
        sys.stderr.flush()
