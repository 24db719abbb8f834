"""`python -m blockrelay_worker.offline.generate`, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_worker.offline.generate import run
from tests.support.models.onnx_blocks_served import opened
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks


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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_stages_threads_and_repetition_do_not_show_in_a_sampled_text(w8a8: BlockFolder) -> None:
    options = ("--ids", "1,5,9", "--max-tokens", "10", "--temperature", "1", "--top-p", "0.9", "--ignore-eos")
    first = _json(w8a8, *options)
    assert len(first["tokens"]) == 10
    other = _json(w8a8, *options, "--stages", "3", "--threads", "2", "--seed", str(first["seed"]))
    assert other["tokens"] == first["tokens"]
    assert _json(w8a8, *options, "--seed", "99")["tokens"] != first["tokens"]


@pytest.mark.thorough
def test_without_a_kv_cache_the_text_is_the_same(w8a8: BlockFolder) -> None:
    options = ("--ids", "1,5,9", "--max-tokens", "10", "--temperature", "1", "--ignore-eos")
    for stages in ("1", "2"):
        assert _json(w8a8, *options, "--no-kv-cache", "--stages", stages)["tokens"] == _json(w8a8, *options)["tokens"]


@pytest.mark.thorough
def test_a_stop_string_ends_the_text_before_it(w8a8: BlockFolder) -> None:
    text = _json(w8a8, "--prompt", "The dog", "--max-tokens", "20", "--ignore-eos")["text"]
    stop = text[5:8]
    report = _json(w8a8, "--prompt", "The dog", "--max-tokens", "20", "--ignore-eos", "--stop", stop)
    assert report["text"] == text[: text.index(stop)]
    assert report["finish_reason"] == "stop"


@pytest.mark.thorough
def test_log_probabilities_are_reported_for_every_token(w8a8: BlockFolder) -> None:
    report = _json(w8a8, "--ids", "1,7", "--max-tokens", "3", "--ignore-eos", "--logprobs", "2")
    assert [entry["token"] for entry in report["logprobs"]] == report["tokens"]
    for entry in report["logprobs"]:  # greedy: the chosen token is the best one
        assert entry["top"][0] == [entry["token"], entry["logprob"]]
        assert len(entry["top"]) == 2


@pytest.mark.thorough
def test_without_a_limit_the_text_ends_with_the_context_at_the_latest(w8a8: BlockFolder) -> None:
    ids = ",".join(["5"] * 500)
    report = _json(w8a8, "--ids", ids, "--ignore-eos")
    assert (len(report["tokens"]), report["finish_reason"]) == (12, "length")


def _printed(capsys: pytest.CaptureFixture[str], folder: BlockFolder, *options: str) -> str:
    """What the command prints, run in this process."""
    assert run(["--model", str(folder.root), "--threads", "1", *options]) == 0
    return capsys.readouterr().out


@pytest.mark.thorough
def test_an_explained_text_is_the_same_and_every_step_says_what_its_stages_did(
    w8a8: BlockFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--prompt", "Once upon a time", "--max-tokens", "5", "--ignore-eos", "--stages", "2", "--json")
    plain, explained = (json.loads(_printed(capsys, w8a8, *options, *more)) for more in ((), ("--explain",)))
    assert explained["tokens"] == plain["tokens"] and explained["text"] == plain["text"]

    steps, totals, prompt = explained["steps"], explained["totals"], plain["prompt_tokens"]
    assert [one["token"] for one in steps] == plain["tokens"]
    for step in steps:
        rows = prompt if step["step"] == 1 else 1
        first, last = step["stages"]
        assert (first["blocks"], last["blocks"]) == ("1-3", "4-5")
        assert (first["input"], first["output"]) == ([rows], [rows, 64])
        assert (last["input"], last["output"]) == ([rows, 64], [1, 512])
        assert first["transfer_s"] == 0 < last["transfer_s"], "the first stage takes tokens"
        for one in step["stages"]:
            assert one["device"] == one["class"] == "cpu"
            assert min(one["compute_s"], one["kv_s"]) > 0
            assert one["transfer_s"] + one["compute_s"] + one["kv_s"] <= one["total_s"]
        assert sum(one["total_s"] for one in step["stages"]) + step["sampling_s"] <= step["total_s"]
    assert (totals["tokens"], totals["inferences"], totals["prompt_tokens"]) == (5, 5, prompt)
    assert totals["inference_s"] == pytest.approx(sum(explained["timings"]["block_s"].values()))
    assert totals["total_s"] <= explained["timings"]["total_s"]


@pytest.mark.thorough
def test_an_explanation_is_a_table_with_the_text_below(w8a8: BlockFolder, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", "Once upon a time", "--max-tokens", "4", "--ignore-eos", "--stages", "3")
    text = _printed(capsys, w8a8, *options)
    table = _printed(capsys, w8a8, *options, "--explain")
    assert table.endswith(f"ms each\n{text}")
    lines = table.removesuffix(text).splitlines()
    assert [line.split()[0] for line in lines[2:14]] == ["1", "1", "2", "2", "1", "2", "3", "1", "2", "4", "1", "2"]
    assert lines[14].startswith("total ") and lines[15].startswith("4 tokens in 4 steps")
    tokens = json.loads(_printed(capsys, w8a8, *options, "--json"))["tokens"]
    assert all(f"  {token} " in line for token, line in zip(tokens, lines[4:14:3], strict=True))


@pytest.mark.thorough
def test_a_stage_on_a_device_tells_the_way_to_its_process(
    fp32: BlockFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--ids", "1,5,9", "--max-tokens", "4", "--ignore-eos", "--stages", "3", "--json")
    own = json.loads(_printed(capsys, fp32, *options))
    devices = ("--gpu", "cpu", "--stage-devices", "cpu,gpu,cpu")
    mixed = json.loads(_printed(capsys, fp32, *options, *devices, "--explain"))
    assert mixed["tokens"] == own["tokens"], "within what floats differ by"
    cpu, device_id = mixed["numerics_id"].split("/")
    assert cpu == own["numerics_id"] and "-cpu-" in device_id, "equal ids promise equal bits"
    for step in mixed["steps"]:
        first, device, last = step["stages"]
        assert [one["class"] for one in step["stages"]] == ["cpu", "gpu", "cpu"]
        assert (device["device"], device["blocks"], last["input"]) == ("cpu", "3-4", device["output"])
        assert min(device["transfer_s"], device["compute_s"], device["kv_s"]) > 0
        assert device["transfer_s"] + device["compute_s"] + device["kv_s"] <= device["total_s"]
        assert first["transfer_s"] == 0


@pytest.mark.onnx_blocks
def test_onnx_blocks_run_in_a_process_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = opened(write_reference_blocks(tmp_path / "blocks", ReferenceModel(layers=2)), tmp_path / "cache")
    options = ("--ids", "1,5,9", "--max-tokens", "3", "--ignore-eos", "--json", "--explain")
    explained = json.loads(_printed(capsys, blocks, *options))
    stages = [one for step in explained["steps"] for one in step["stages"]]
    assert [(one["blocks"], one["class"], one["device"]) for one in stages] == 3 * [("1-3", "gpu", "cpu")]
    assert min(min(one["transfer_s"], one["compute_s"], one["kv_s"]) for one in stages) > 0


@pytest.mark.thorough
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


@pytest.mark.thorough
@pytest.mark.parametrize("options", [["--prompt", "a"], ["--ids", "1", "--stop", "a"]])
def test_text_for_a_model_without_a_tokenizer_is_refused(
    ids_only: BlockFolder, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--model", str(ids_only.root), *options]) == 2
    assert "the model has no tokenizer" in capsys.readouterr().err


@pytest.mark.thorough
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
        (("--ids", "1", "--explain", "--stages", "2", "--stage-devices", "cpu,gpu"), "say which device with --gpu"),
        (("--ids", "1", "--gpu", "cpu", "--stages", "2", "--stage-devices", "cpu,cpu"), "no stage is for --gpu cpu"),
        (("--ids", "1", "--gpu", "cpu", "--stages", "3", "--stage-devices", "cpu,gpu"), "devices of 2 stages"),
        (("--ids", "1", "--gpu", "nothing:0"), "not a device of ONNX Runtime"),
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
    assert err.startswith("blockrelay: ")
    assert complaint in err
    assert err.count("\n") == 1


@pytest.mark.thorough
def test_the_process_ends_with_that_code(w8a8: BlockFolder) -> None:
    done = _run(w8a8, "--ids", "1,512")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "blockrelay: ids: token id 512 at index 1 is not in 0..511\n"
