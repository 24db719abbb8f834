"""What a device can do decides how stages compute there."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import KnownAnswerMismatch
from blockrelay_worker.execution.batch import Segment
from blockrelay_worker.execution.onnx import loading
from blockrelay_worker.execution.onnx.batches import cut
from blockrelay_worker.execution.onnx.graphs.flavours import PAGED, PAGED_IN_PARTS, PLAIN, Flavour
from blockrelay_worker.execution.onnx.known_answers import PAGES_NEEDED, check, known_answers
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.probe import (
    Attend,
    PagedAttention,
    attention_on,
    longest_sequence,
    paged_attention,
)
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.execution.onnx.stage import OnnxStage
from blockrelay_worker.execution.page_layout import layout_of
from tests.support.worker.onnx_devices import FLOAT16


@pytest.mark.parametrize(
    ("precision", "operator", "float16", "adds", "flavour"),
    [
        ("w8a8", True, True, False, PAGED),
        ("w8a8", True, True, True, PAGED_IN_PARTS),
        ("fp32", True, True, True, PLAIN),
        ("w8a8", False, True, True, PLAIN),
        ("w8a8", True, False, True, PLAIN),
    ],
)
def test_the_flavour_follows_from_model_provider_and_device(
    precision: str,
    operator: bool,
    float16: bool,
    adds: bool,
    flavour: Flavour,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "failure", lambda *_: "" if float16 else "no float16")  # pyright: ignore
    monkeypatch.setattr(loading, "paged_attention", lambda *_: PagedAttention())  # pyright: ignore
    monkeypatch.setattr(CpuProvider, "has_paged_attention", operator)
    monkeypatch.setattr(CpuProvider, "adds_in_float16", adds)
    folder: BlockFolder = request.getfixturevalue(precision)
    assert OnnxExecutors(CpuProvider()).flavour_of(folder.manifest) is flavour


def test_segments_are_cut_where_they_are_too_long() -> None:
    long, short = Segment(rows=65, first_position=7, pages=[3, 1]), Segment(rows=31, first_position=0, pages=[2])
    assert cut([long, short], 31) == [
        Segment(rows=31, first_position=7, pages=[3, 1]),
        Segment(rows=31, first_position=38, pages=[3, 1]),
        Segment(rows=3, first_position=69, pages=[3, 1]),
        short,
    ]


def plain(folder: BlockFolder) -> Attend:
    return attention_on(CpuProvider(), folder.model, PLAIN)


def wrong_from(rows: int, attend: Attend) -> Attend:
    """Silent rubbish in sequences of so many rows, from the fifth row on: as of small subgroups."""

    def attend_wrongly(segments: Sequence[Segment], given: NDArray[np.float32]) -> NDArray[np.float32]:
        found, at = attend(segments, given).copy(), 0
        for segment in segments:
            if segment.rows >= rows:
                found[at + 4 : at + segment.rows] *= np.float32(1.1)
            at += segment.rows
        return found

    return attend_wrongly


@pytest.mark.parametrize(("rows", "longest"), [(32, 31), (33, 31), (65, 31), (66, None)])
def test_what_is_wrong_in_long_sequences_gets_short_ones(fp32: BlockFolder, rows: int, longest: int | None) -> None:
    device = wrong_from(rows, plain(fp32))
    assert longest_sequence(device, plain(fp32), fp32.model, where="webgpu:7") == longest


@pytest.mark.parametrize(
    ("spoil", "case"),
    [
        (lambda attend: wrong_from(31, attend), "a prompt of 31"),
        (lambda attend: wrong_from(20, attend), "a prompt of 31"),
        (lambda attend: lambda segments, rows: attend(segments, rows) * np.float32("nan"), "a prompt of 1"),
    ],
)
def test_what_is_wrong_in_short_ones_too_is_refused_by_name(
    fp32: BlockFolder, spoil: Callable[[Attend], Attend], case: str
) -> None:
    with pytest.raises(
        KnownAnswerMismatch, match=f"^webgpu:7 attends wrongly, in sequences of 31 rows too: {case}: off by (0.1|nan) "
    ):
        longest_sequence(spoil(plain(fp32)), plain(fp32), fp32.model, where="webgpu:7")


def test_stages_with_short_sequences_compute_the_same(fp32: BlockFolder) -> None:
    stage = OnnxStage(
        fp32, 1, 5, pages=PAGES_NEEDED, provider=CpuProvider(), numerics_id="x", flavour=PLAIN, longest=31
    )
    assert stage.details["quirk"] == "segments are cut to 31 rows"
    check(stage, known_answers(fp32, 1, 5, loading.reference), where="cpu", tolerance=1e-5)


def test_numerics_ids_tell_flavours_and_quirks_apart(w8a8: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Able(CpuProvider):
        """Says that it has the operator; it adds in float16 by float32."""

        has_paged_attention = True

    plain_id = OnnxExecutors(CpuProvider()).numerics_id(w8a8.manifest)
    found = {plain_id}
    for longest in (None, 31):
        monkeypatch.setattr(loading, "paged_attention", lambda *_, longest=longest: PagedAttention(longest=longest))  # pyright: ignore
        found.add(OnnxExecutors(Able()).numerics_id(w8a8.manifest))
    assert len(found) == 3


class Lacking(CpuProvider):
    """Says that it has the operator, for which ONNX Runtime's CPU kernels have no kernel."""

    has_paged_attention = True


def test_a_device_that_refuses_the_heads_attends_by_standard_operators(
    w8a8: BlockFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    executors, other = OnnxExecutors(Lacking()), OnnxExecutors(CpuProvider())
    # What it does is known, and said once, before a stage is loaded
    assert executors.numerics_id(w8a8.manifest) == other.numerics_id(w8a8.manifest)
    told = capsys.readouterr().out
    assert told.count("PAGED_ATTENTION_REFUSED") == 1 and "PagedAttention" in told
    assert executors.memory(w8a8) == other.memory(w8a8)
    assert executors.memory(w8a8).layer_page_bytes == 2 * layout_of(w8a8, 1, 1).bytes_per_page
    # And so it serves
    assert executors.load(w8a8, 1, 2, pages=PAGES_NEEDED).details["flavour"] == "plain"
    assert "REFUSED" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["CUDA failure 2: out of memory", "Device is lost"])
def test_a_device_without_room_or_lost_is_no_device_that_refuses(
    w8a8: BlockFolder, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Lacking):
        def session(self, graph: bytes, *, quiet: bool = False, capture: bool = False) -> ort.InferenceSession:
            if b"PagedAttention" in graph:
                raise RuntimeError(text)
            return super().session(graph, quiet=quiet, capture=capture)

    with pytest.raises(RuntimeError, match=text):
        OnnxExecutors(Failing()).numerics_id(w8a8.manifest)


@pytest.mark.parametrize("device", [pytest.param("webgpu:0", marks=FLOAT16)])
def test_heads_that_a_driver_refuses(w8a8: BlockFolder, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    provider = open_provider(device)
    odd = replace(w8a8.model, head_dim=18)
    assert paged_attention(provider, odd).refusal
    assert "PAGED_ATTENTION_REFUSED" in capsys.readouterr().out
    assert not paged_attention(provider, w8a8.model).refusal


@pytest.mark.driver_on_cpu
@pytest.mark.parametrize(("device", "dtype"), [pytest.param("webgpu:0", "float16", marks=FLOAT16)])
def test_a_driver_that_is_wrong_from_32_rows_on_serves_all_the_same(w8a8: BlockFolder, device: str, dtype: str) -> None:
    # Given a stage on lavapipe: it is cut, and says so
    provider = open_provider(device)
    executors = OnnxExecutors(provider)
    stage = executors.load(w8a8, 1, 2, pages=PAGES_NEEDED)
    assert stage.details["flavour"] == "paged" and stage.details["dtype"] == dtype
    assert stage.details["quirk"] == "segments are cut to 31 rows"
    # When it is not, then its known answers tell
    whole = OnnxStage(w8a8, 1, 2, pages=PAGES_NEEDED, provider=provider, numerics_id="x", flavour=PAGED)
    with pytest.raises(KnownAnswerMismatch, match=r"webgpu:0 computes wrong numbers .*: a prompt of 32: off by 0"):
        check(whole, known_answers(w8a8, 1, 2, loading.reference), where=device, tolerance=2e-2)
