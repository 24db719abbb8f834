"""The demo as a chat and as a batch: real processes, talked to through pipes, that leave nothing behind."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny_model import write_tiny_model
from tests.support.systems.up_process import COMMAND

#: So slow that an answer is under way for seconds.
SLOW = {"BLOCKRELAY_INJECT_SPEED": "0.03"}
STORY = "Tell me a story."


class Demo:
    """A running `blockrelay demo`: what is written is its stdin, what it says is read up to a mark."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self._unread = b""

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def until(self, mark: str) -> str:
        """What comes before the next `mark`, which is read too."""
        assert self.process.stdout is not None
        while mark.encode() not in self._unread:
            news = os.read(self.process.stdout.fileno(), 1 << 16)
            assert news, f"it ended before it said {mark!r}: {self._unread!r}"
            self._unread += news
        before, _, self._unread = self._unread.partition(mark.encode())
        return before.decode()

    def answer(self, question: str) -> str:
        """The line that answers; the model's answers are one."""
        self.say(question)
        return self.until("\n")

    def interrupt(self) -> None:
        """As a terminal does it: to the demo and to what it has started, unless that is on its own."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ended(self) -> tuple[int, str, str]:
        """After the end of its input: the exit code, the rest of stdout, stderr."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, (self._unread + out).decode(), err.decode()


@contextmanager
def demo(*options: str | Path, **env: str) -> Iterator[Demo]:
    """Of one stage. It must leave no data folder: nothing is unfinished when it ends."""
    with tempfile.TemporaryDirectory(prefix="br-demo-") as folder:  # short: sockets lie in it
        argv = [*COMMAND, "demo", "--stages", "1", *map(str, options)]
        pipe = subprocess.PIPE
        whole = {**os.environ, "TMPDIR": folder, "COLUMNS": "120", **env}
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=whole, process_group=0) as process:
            try:
                yield Demo(process)
            finally:
                if process.poll() is None:
                    process.kill()
        assert os.listdir(folder) == []


def test_a_chat_goes_on_and_begins_anew() -> None:
    with demo("--interactive") as chat:
        assert chat.until("\n").startswith("storyteller is ready")
        story = chat.answer(STORY)
        assert story.startswith("Once upon a time") and story.endswith("The end.")
        chat.say("")
        who = story.partition(" named ")[2].partition(".")[0]
        assert who in chat.answer(f"Where is {who}?")  # the model has read the story
        assert chat.answer("/new") == "(a new conversation)"
        assert who not in chat.answer(f"Where is {who}?")
        chat.say("/new")
        chat.until("\n")
        assert chat.answer(STORY) == story
        chat.say("/help")
        assert "/quit" in chat.until("(Ctrl-D)\n")
        assert chat.answer("/nothing").startswith("(/nothing is no command")
        chat.say("word " * 1100)  # more than the context
        assert chat.answer("Who are you?")
        code, table, err = chat.ended()
    assert code == 0, err
    assert "│ turns               │ 6 (1 failed)" in table and "tokens per second" in table
    assert "time to first token" in table
    (error,) = [line for line in err.splitlines() if line.startswith("blockrelay: ")]
    assert "maximum context length is 1024 tokens, and messages has " in error


def test_the_oldest_turns_are_left_out_where_the_context_ends(tmp_path: Path) -> None:
    """The first answer of this model is as long as may be, a half of its context of 512 tokens."""
    with demo("--interactive", "--model", write_tiny_model(tmp_path)) as chat:
        for line in ("one", "two", "/quit"):
            chat.say(line)
        code, said, err = chat.ended()
    assert code == 0, err
    assert said.count("(the oldest turn is left out: the model's context is 512 tokens)\n") == 1
    assert "│ turns               │ 2 " in said


def test_ctrl_c_ends_an_answer_and_at_the_prompt_the_chat() -> None:
    with demo("--interactive", **SLOW) as chat:
        chat.until("\n")
        chat.say(STORY)
        chat.until("Once upon")
        chat.interrupt()
        assert "The end." not in chat.until(" (cancelled)\n")
        assert chat.answer("Who is it?")
        chat.interrupt()
        code, table, err = chat.ended()
    assert code == 0, err
    assert "2 (1 cancelled)" in table and "unfinished" not in err


def prompts(folder: Path, lines: list[dict[str, Any]]) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    return file


def test_a_batch_gives_results_in_order_and_figures(tmp_path: Path) -> None:
    lines = [
        {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0},
        {"messages": [{"role": "user", "content": STORY}], "max_tokens": 8, "seed": 5},
        {"prompt": "Once " * 1025},
        {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0},
    ]
    with demo("--batch", prompts(tmp_path, lines), "--json", "--concurrency", "2") as batch:
        code, out, err = batch.ended()
    assert code == 1, err
    *results, last = map(json.loads, out.splitlines())
    assert [result["index"] for result in results] == [0, 1, 2, 3]
    assert [result["error"] is None for result in results] == [True, True, False, True]
    assert [result["tokens"] for result in results] == [60, 8, 0, 60]
    assert results[0]["text"] == results[3]["text"] != ""
    assert results[1]["messages"] == lines[1]["messages"] and results[0]["prompt"] == "Once upon a time"
    assert "maximum context length is 1024 tokens" in results[2]["error"] and results[2]["first_token_s"] is None
    for result in (results[0], results[1]):
        assert 0 < result["first_token_s"] <= result["total_s"] and result["finish_reason"] == "length"
        assert result["prompt_tokens"] > 0
    summary = last["summary"]
    assert (summary["prompts"], summary["ok"], summary["failed"], summary["tokens"]) == (4, 3, 1, 128)
    assert summary["first_token_mean_s"] <= summary["first_token_p95_s"] <= summary["seconds"]


def test_a_batch_of_text_that_goes_well(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("Once upon a time\n\nThe old fox\n")
    with demo("--batch", tmp_path / "prompts") as batch:
        code, out, err = batch.ended()
    assert code == 0, err
    first, _, rest = out.partition("\n2. The old fox\n")
    assert first.startswith("1. Once upon a time\n") and first.endswith(" s)\n")
    assert "time to first token" in rest and " at p95" in rest


@pytest.mark.parametrize("many", [3, 12])
def test_ctrl_c_ends_a_batch_and_all_that_is_under_way(tmp_path: Path, many: int) -> None:
    lines: list[dict[str, Any]] = [{"prompt": "Once upon a time", "max_tokens": 1}]
    lines += [{"prompt": "Once upon a time", "seed": seed} for seed in range(many)]
    with demo("--batch", prompts(tmp_path, lines), **SLOW) as batch:
        batch.until("(1 token, ")
        batch.interrupt()
        code, _, err = batch.ended()
    assert code == 130 and "unfinished" not in err and "Traceback" not in err, err
