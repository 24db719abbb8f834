"""`blockrelay bench`: one real measurement, and what it refuses."""

import json
import subprocess
from pathlib import Path

import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import UsageError
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_launcher.bench.command import show
from blockrelay_launcher.bench.options import BenchOptions
from tests.support.systems.up_process import COMMAND

KEYS = {"requests", "decode_tok_s", "prefill_ms", "ttft_ms_p50", "itl_ms_p50", "itl_ms_p99"}


def bench(*argv: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [*COMMAND, "bench", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.system
def test_one_measurement_gives_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    figures = ("--requests", "1,3", "--prompt", "20", "--new", "6", "--rounds", "1", "--prefix", "40")
    done = bench(*figures, "--kv-cache", "--memory", "--sampled", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for side in ("gateway", "in_process"):
        assert [entry["requests"] for entry in report[side]] == [1, 3]
        for entry in report[side]:
            assert entry.keys() >= KEYS
            # Tokens that come together have no time between them, and where all do there is none (null).
            assert all(entry[key] is None or entry[key] >= 0 for key in KEYS), entry
            assert entry["decode_tok_s"] > 0 and entry["prefill_ms"] >= entry["ttft_ms_p50"] > 0
    assert [entry["requests"] for entry in report["ratio"]] == [1, 3]
    assert report["prefix"]["tokens"] == 40 and report["prefix"]["second_ttft_ms"] > 0
    [cache] = report["kv_cache"]
    assert (cache["prompt"], cache["new"]) == (20, 20)
    assert min(cache["whole_on_ms"], cache["whole_off_ms"], cache["second_step_on_ms"], cache["whole"]) > 0
    assert all(value >= 0 for value in cache.values())  # tokens that come together have no time between them
    assert [(one["requests"], one["temperature"], one["top_p"]) for one in report["sampled"]] == [
        (1, 0.6, 0.9),
        (3, 0.6, 0.9),
    ]
    assert all(one[side]["ratio"] > 0 for one in report["sampled"] for side in ("gateway", "in_process"))
    [worker] = report["memory"]["workers"]
    assert worker["rss_anon"] > 0 and worker["weights"] > 0 and worker["ratio"] > 0
    assert report["machine"]["cores"] >= 1 and not report["options"]["speculation"]
    show(report)
    shown = capsys.readouterr().out
    assert "storyteller, w8a8" in shown
    assert "temperature 0.6, top-p 0.9, 3 requests, prompt 20: decode" in shown


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "/nowhere"], "no such block folder"),
        (["--url", "http://127.0.0.1:9"], "no gateway answers there"),
        (["--url", "nonsense"], "no gateway answers there"),
        (["--prompt", "100000"], "context is"),
        (["--requests", "0"], "at least 1"),
        (["--requests", "many"], "whole numbers"),
        (["--new", "1"], "at least 2"),
        (["--stages", "99"], "blocks"),
        (["--kv-cache", "--prompt", "1000", "--new", "2"], "--kv-cache adds 50 tokens"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_code_2(argv: list[str], words: str) -> None:
    done = bench(*argv, "--json")
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        BenchOptions(prompt="0"),
        BenchOptions(requests=""),
        BenchOptions(requests="0"),
        BenchOptions(new=1),
        BenchOptions(prefix=10**6),
        BenchOptions(url="http://h", memory=True),
        BenchOptions(url="http://h", roofline=True),
        BenchOptions(url="http://h", stages=2),
    ],
)
def test_options_that_make_no_sense_together(options: BenchOptions) -> None:
    with pytest.raises(UsageError):
        options.check({"model"})
        options.check_for(open_block_folder(BUNDLED_MODEL, blocks=[]))
