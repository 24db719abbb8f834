"""What a batch prints: one entry for each prompt, and the figures of all."""

import pytest

from blockrelay_launcher.demo.answer import Answer
from blockrelay_launcher.demo.batch_file import Prompt
from blockrelay_launcher.demo.batch_report import Result, summarise


def result(index: int, *, first_s: float | None, tokens: int = 0, error: str | None = None) -> Result:
    answer = Answer(100.0, first=first_s, tokens=tokens, text="b" * tokens)
    return Result(
        index=index, prompt=Prompt({"prompt": "a " * 40, "seed": 1}), answer=answer, total_s=1.25, error=error
    )


def test_an_entry_has_the_first_sixty_characters_the_text_and_the_figures() -> None:
    assert result(0, first_s=0.5, tokens=3).to_text() == f"1. {'a ' * 30}…\nbbb\n(3 tokens, 1.25 s)\n\n"
    assert result(1, first_s=None, error="no").to_text() == f"2. {'a ' * 30}…\n(0 tokens, 1.25 s; failed: no)\n\n"


def test_an_entry_as_json() -> None:
    assert result(4, first_s=0.5, tokens=3).to_json() == {
        "index": 4,
        "prompt": "a " * 40,
        "text": "bbb",
        "finish_reason": None,
        "prompt_tokens": 0,
        "tokens": 3,
        "first_token_s": 0.5,
        "total_s": 1.25,
        "error": None,
    }


def test_the_summary_counts_everything_once() -> None:
    results = [result(at, first_s=(at + 1) / 10, tokens=10) for at in range(20)]
    results.append(result(20, first_s=None, error="no"))
    found = summarise(results, 10.0)
    assert found.to_json() == {
        "summary": {
            "prompts": 21,
            "ok": 20,
            "failed": 1,
            "tokens": 200,
            "seconds": 10.0,
            "tokens_per_s": 20.0,
            "requests_per_s": 2.0,
            "first_token_mean_s": pytest.approx(1.05),
            "first_token_p95_s": 1.9,
        }
    }
    assert found.rows()["time to first token"] == "1050 ms on average, 1900 ms at p95"


def test_without_a_token_there_is_no_time_to_it() -> None:
    found = summarise([result(0, first_s=None, error="no")], 1.0)
    assert found.first_token_mean_s is None and "time to first token" not in found.rows()
