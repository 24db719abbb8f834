"""`python -m blockrelay_worker.offline.evaluate`, as a user runs it, and its windows."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_worker.offline.evaluate import CHUNK_ROWS, run, windows
from blockrelay_worker.offline.pipeline import Pipeline
from blockrelay_worker.sampling.sampler import log_probabilities

TEXT = "The lamp was lit every evening, naïve as it was. Who has the ball? Where is the dog? " * 14


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def _json(folder: BlockFolder, text: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert run(["--model", str(folder.root), "--text", str(text), "--threads", "1", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def _token_by_token(folder: BlockFolder, ids: list[int]) -> list[float]:
    """-ln p of tokens 1.. of `ids`, each run alone after those before it."""
    pipeline = Pipeline(folder, stages=1, threads=1, tokens=len(ids))
    losses: list[float] = []
    for position, token in enumerate(ids[:-1]):
        logits = pipeline.run([token], position)[0]
        losses.append(-float(log_probabilities(logits)[ids[position + 1]]))
    return losses


@pytest.mark.parametrize("precision", ["w8a8", "fp32"])
def test_a_text_of_one_window_is_scored_as_decoding_would(
    precision: str, text: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    folder: BlockFolder = request.getfixturevalue(precision)
    assert folder.tokenizer_path is not None
    ids = Tokenizer.from_file(folder.tokenizer_path).encode(TEXT)
    assert CHUNK_ROWS < len(ids) < 512
    losses = _token_by_token(folder, ids)

    report = _json(folder, text, capsys)
    assert (report["model"], report["precision"]) == ("tiny", precision)
    assert (report["tokens"], report["windows"]) == (len(ids) - 1, 1)
    # the first id is <s>, which stands for nothing: all of the text is scored
    assert report["bytes"] == len(TEXT.encode())
    assert math.log(report["perplexity"]) == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)
    assert report["nll"] == pytest.approx(math.log(report["perplexity"]))
    assert report["bits_per_byte"] == pytest.approx(report["nll"] * report["tokens"] / math.log(2) / report["bytes"])
    assert report["timings"]["ms_per_token"] > 0


def test_windows_give_each_token_only_what_stands_before_it_there(
    w8a8: BlockFolder, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert w8a8.tokenizer_path is not None
    ids = Tokenizer.from_file(w8a8.tokenizer_path).encode(TEXT)[:20]
    losses = _token_by_token(w8a8, ids[:12]) + _token_by_token(w8a8, ids[8:20])[3:]
    report = _json(w8a8, text, capsys, "--tokens", "20", "--context", "12", "--stride", "8")
    assert (report["tokens"], report["windows"], report["context"], report["stride"]) == (19, 2, 12, 8)
    assert report["nll"] == pytest.approx(math.fsum(losses) / 19, rel=1e-9)


@given(tokens=st.integers(2, 300), context=st.integers(2, 40), data=st.data())
def test_every_token_but_the_first_is_scored_once_with_context(tokens: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context - 1))
    found = windows(tokens, context=context, stride=stride)
    assert [token for window in found for token in range(window.scored, window.end)] == list(range(1, tokens))
    for window in found:
        assert window.end - window.first <= context
        assert window.scored - window.first >= (1 if window.first == 0 else context - stride)


def test_two_tokens_are_enough_and_the_plain_answer_is_for_people(
    w8a8: BlockFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").write_text("a")  # <s> and one token
    assert run(["--model", str(w8a8.root), "--text", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.startswith("perplexity ")


@pytest.mark.parametrize(
    ("content", "options", "complaint"),
    [
        (None, (), "cannot be read: No such file"),
        (b"", (), "is empty"),
        (b"text\xff\xfe", (), "is not UTF-8 (byte 4)"),
        (b"a\0b", (), "holds NUL bytes"),
        (b"words", ("--context", "513"), "--context 513 is beyond the model's context of 512"),
        (b"words", ("--context", "8", "--stride", "8"), "--stride 8 must be below the context of 8"),
        (b"words", ("--tokens", "1"), "--tokens"),
        (b"words", ("--model", "/nowhere"), "/nowhere: no such block folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    w8a8: BlockFolder,
    content: bytes | None,
    options: tuple[str, ...],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    assert run(["--model", str(w8a8.root), "--text", str(tmp_path / "text"), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("blockrelay: ")
    assert complaint in err
    assert err.count("\n") == 1


def test_a_text_too_short_and_a_model_without_a_tokenizer_are_refused(
    ids_only: BlockFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("words")
    assert run(["--model", str(ids_only.root), "--text", str(tmp_path / "text")]) == 2
    assert "the model has no tokenizer" in capsys.readouterr().err
    # The bundled tokenizer adds no <s>: one letter is one token.
    (tmp_path / "text").write_text("a")
    assert run(["--text", str(tmp_path / "text")]) == 2
    assert "1 token(s) of text; at least 2" in capsys.readouterr().err


def test_the_launcher_knows_it(text: Path) -> None:
    command = [sys.executable, "-m", "blockrelay_launcher", "evaluate", "--text", str(text), "--json"]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert json.loads(done.stdout)["model"] == "storyteller"
