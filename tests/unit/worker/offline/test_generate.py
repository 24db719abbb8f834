"""`python -m blockrelay_worker.offline.generate`, as a user runs it."""

import json
import subprocess
import sys
from typing import Any

import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_worker.offline.generate import run


def _run(folder: BlockFolder, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "blockrelay_worker.offline.generate",
        "--model",
        str(folder.root),
        "--threads",
        "1",
    ]
    return subprocess.run([*command, *options], capture_output=True, check=False, text=True, encoding="utf-8")


def _json(folder: BlockFolder, *options: str) -> dict[str, Any]:
    done = _run(folder, *options, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


def test_a_prompt_is_continued_and_the_text_is_that_of_the_tokens(w8a8: BlockFolder) -> None:
    plain = _run(w8a8, "--prompt", "Once upon a time", "--max-tokens", "12")
    report = _json(w8a8, "--prompt", "Once upon a time", "--max-tokens", "12")

    assert plain.returncode == 0
    assert plain.stdout == report["text"] + "\n"
    assert w8a8.tokenizer_path is not None
    tokenizer = Tokenizer.from_file(w8a8.tokenizer_path)
    assert report["text"] == tokenizer.decode(report["tokens"])
    assert report["prompt_tokens"] == len(tokenizer.encode("Once upon a time"))
    assert (report["model"], report["precision"]) == ("tiny", "w8a8")
    assert report["finish_reason"] in ("stop", "length")
    assert report["timings"]["total_s"] >= report["timings"]["first_token_s"] > 0
    assert set(report["timings"]["block_s"]) == {f"block_{index}" for index in range(1, 6)}


def test_stages_threads_and_repetition_do_not_show_in_a_sampled_text(w8a8: BlockFolder) -> None:
    options = ("--ids", "1,5,9", "--max-tokens", "10", "--temperature", "1", "--top-p", "0.9", "--ignore-eos")
    first = _json(w8a8, *options)
    assert len(first["tokens"]) == 10
    other = _json(w8a8, *options, "--stages", "3", "--threads", "2", "--seed", str(first["seed"]))
    assert other["tokens"] == first["tokens"]
    assert _json(w8a8, *options, "--seed", "99")["tokens"] != first["tokens"]


def test_without_a_kv_cache_the_text_is_the_same(w8a8: BlockFolder) -> None:
    options = ("--ids", "1,5,9", "--max-tokens", "10", "--temperature", "1", "--ignore-eos")
    for stages in ("1", "2"):
        assert _json(w8a8, *options, "--no-kv-cache", "--stages", stages)["tokens"] == _json(w8a8, *options)["tokens"]


def test_a_stop_string_ends_the_text_before_it(w8a8: BlockFolder) -> None:
    text = _json(w8a8, "--prompt", "The dog", "--max-tokens", "20", "--ignore-eos")["text"]
    stop = text[5:8]
    report = _json(w8a8, "--prompt", "The dog", "--max-tokens", "20", "--ignore-eos", "--stop", stop)
    assert report["text"] == text[: text.index(stop)]
    assert report["finish_reason"] == "stop"


def test_log_probabilities_are_reported_for_every_token(w8a8: BlockFolder) -> None:
    report = _json(w8a8, "--ids", "1,7", "--max-tokens", "3", "--ignore-eos", "--logprobs", "2")
    assert [entry["token"] for entry in report["logprobs"]] == report["tokens"]
    for entry in report["logprobs"]:  # greedy: the chosen token is the best one
        assert entry["top"][0] == [entry["token"], entry["logprob"]]
        assert len(entry["top"]) == 2


def test_without_a_limit_the_text_ends_with_the_context_at_the_latest(w8a8: BlockFolder) -> None:
    ids = ",".join(["5"] * 500)
    report = _json(w8a8, "--ids", ids, "--ignore-eos")
    assert (len(report["tokens"]), report["finish_reason"]) == (12, "length")


def test_a_model_without_a_tokenizer_takes_and_gives_ids(
    ids_only: BlockFolder, w8a8: BlockFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--ids", "1,7,9", "--max-tokens", "5", "--ignore-eos", "--threads", "1"]
    assert run(["--model", str(ids_only.root), *options]) == 0
    plain = capsys.readouterr().out
    assert run(["--model", str(ids_only.root), *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)

    assert [int(token) for token in plain.split()] == report["tokens"]
    assert report["text"] is None
    assert report["tokens"] == _json(w8a8, *options)["tokens"]


@pytest.mark.parametrize("options", [["--prompt", "a"], ["--ids", "1", "--stop", "a"]])
def test_text_for_a_model_without_a_tokenizer_is_refused(
    ids_only: BlockFolder, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--model", str(ids_only.root), *options]) == 2
    assert "the model has no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "either --prompt or --ids"),
        (("--prompt", "a", "--ids", "1"), "either --prompt or --ids"),
        (("--ids", "1,two"), "ids must be whole numbers"),
        (("--ids", "1,512"), "token id 512 at index 1 is not in 0..511"),
        (("--ids", "1", "--max-tokens", "512"), "max_tokens"),
        (("--ids", "1", "--max-tokens", "0"), "max_tokens must be at least 1"),
        (("--ids", "1", "--max-tokens=-3"), "max_tokens must be between"),
        (("--ids", "1", "--max-tokens", "many"), "--max-tokens"),
        (("--ids", ",".join(["5"] * 513)), "context length is 512 tokens, and ids has 513"),
        (("--ids", "1", "--temperature", "3"), "temperature must be between 0 and 2"),
        (("--ids", "1", "--top-p", "0"), "top_p must be above 0"),
        (("--ids", "1", "--stop", ""), "stop string"),
        (("--ids", "1", "--stages", "6"), "stages must be at most 5"),
        (("--ids", "1", "--beams", "2"), "--beams"),
        (("--ids", "1", "--model", "/nowhere"), "/nowhere: no such block folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    w8a8: BlockFolder, options: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["--model", str(w8a8.root), *options])
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert complaint in err
    assert err.count("\n") == 1


def test_the_process_ends_with_that_code(w8a8: BlockFolder) -> None:
    done = _run(w8a8, "--ids", "1,512")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: ids: token id 512 at index 1 is not in 0..511\n"
