"""The results of a batch, one per prompt, and their summary. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blockrelay_launcher.demo.answer import Answer
from blockrelay_launcher.demo.batch_file import Prompt
from blockrelay_launcher.percentile import percentile

SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of one prompt. `total_s` is its time in seconds; `error` is the cause of a failure, or None."""

    index: int
    prompt: Prompt
    answer: Answer
    total_s: float
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the object that `--json` prints for this prompt."""
        answer = self.answer
        return {
            "index": self.index,
            **self.prompt.asked,
            "text": answer.text,
            "finish_reason": answer.reason or None,
            "prompt_tokens": answer.prompt_tokens,
            "tokens": answer.tokens,
            "first_token_s": None if answer.first is None else round(answer.first, 4),
            "total_s": round(self.total_s, 4),
            "error": self.error,
        }

    def to_text(self) -> str:
        """Returns the result as text for people, with an empty line at its end."""
        words = self.prompt.words
        head = words if len(words) <= SHOWN_CHARACTERS else f"{words[:SHOWN_CHARACTERS]}…"
        text = f"{self.answer.text}\n" if self.answer.text else ""
        foot = f"{self.answer.tokens} token{'' if self.answer.tokens == 1 else 's'}, {self.total_s:.2f} s"
        failed = "" if self.error is None else f"; failed: {self.error}"
        return f"{self.index + 1}. {head}\n{text}({foot}{failed})\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a batch. `seconds` is the time from the first request to the last end.

    `tokens` counts failed answers too; `requests_per_s` counts only those that succeeded.
    """

    prompts: int
    ok: int
    failed: int
    tokens: int
    seconds: float
    tokens_per_s: float
    requests_per_s: float
    first_token_mean_s: float | None
    first_token_p95_s: float | None

    def to_json(self) -> dict[str, Any]:
        """Returns the object of the last line of `--json`."""
        rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}
        return {"summary": rounded}

    def rows(self) -> dict[str, str]:
        """Returns the rows of the table; without a first token there is no row of its time."""
        rows = {
            "prompts": str(self.prompts),
            "ok": str(self.ok),
            "failed": str(self.failed),
            "tokens": str(self.tokens),
            "tokens per second": f"{self.tokens_per_s:.0f}",
            "requests per second": f"{self.requests_per_s:.2f}",
        }
        if self.first_token_mean_s is not None and self.first_token_p95_s is not None:
            mean_ms, p95_ms = 1000 * self.first_token_mean_s, 1000 * self.first_token_p95_s
            rows["time to first token"] = f"{mean_ms:.0f} ms on average, {p95_ms:.0f} ms at p95"
        return rows


def summarise(results: Sequence[Result], seconds: float) -> Summary:
    """Returns the figures of all results; `seconds` is the duration of the batch."""
    firsts = [result.answer.first for result in results if result.answer.first is not None]
    ok, tokens = sum(result.error is None for result in results), sum(result.answer.tokens for result in results)
    return Summary(
        prompts=len(results),
        ok=ok,
        failed=len(results) - ok,
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / max(seconds, 1e-9),
        requests_per_s=ok / max(seconds, 1e-9),
        first_token_mean_s=sum(firsts) / len(firsts) if firsts else None,
        first_token_p95_s=percentile(firsts, 0.95) if firsts else None,
    )
