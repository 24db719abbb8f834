"""Kept optimised graphs give the same answers on the same device; one that does not fit is never used."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.onnx.compiled.cache_folder import CacheFolder, private_folder
from blockrelay_worker.execution.onnx.compiled.graphs import CompiledGraphs, compiled_graphs, key_of
from blockrelay_worker.execution.onnx.graphs.flavours import PLAIN
from blockrelay_worker.execution.onnx.graphs.stage import stage_graph
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider, nodes_by_provider
from tests.support.full_disk import no_room
from tests.support.worker.onnx_devices import NAMES

PROMPT = Batch(
    segments=[Segment(rows=20, first_position=0, pages=(3, 1))],
    tokens=np.arange(5, 25, dtype=np.int32),
    wanted=range(20),
)


def kept_in(root: Path) -> CompiledGraphs:
    folder = private_folder(root / "graphs")
    assert folder is not None
    return CompiledGraphs(CacheFolder(folder))


def on(device: str, compiled: CompiledGraphs | None) -> Provider:
    provider = open_provider(device)
    provider.compiled = compiled
    return provider


@pytest.mark.parametrize("device", NAMES)
def test_a_kept_graph_gives_the_same_answers(fp32: BlockFolder, device: str, tmp_path: Path) -> None:
    def answers(compiled: CompiledGraphs | None) -> Any:
        stage = OnnxExecutors(on(device, compiled)).load(fp32, 1, 5, pages=8)
        logits, pages = stage.run(PROMPT).logits, stage.export_pages([3, 1])
        assert logits is not None
        return [logits, *(half for page in pages for layer in page for half in layer)]

    cold, warm = kept_in(tmp_path), kept_in(tmp_path)
    expected = answers(None)
    for compiled in (cold, warm):
        for found, right in zip(answers(compiled), expected, strict=True):
            assert np.array_equal(found, right)
    assert (cold.hits, warm.made) == (0, 0) and cold.made == warm.hits > 0


@pytest.mark.parametrize("device", NAMES)
def test_a_kept_graph_is_on_the_device_wholly(
    fp32: BlockFolder, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = open_provider(device)
    chosen = provider.add_to

    def telling(options: ort.SessionOptions, *, capture: bool = False) -> Sequence[Any]:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        return chosen(options, capture=capture)

    monkeypatch.setattr(provider, "add_to", telling)
    compiled = provider.compiled = kept_in(tmp_path)
    graph = stage_graph(fp32.model, 1, 5, PLAIN)
    cold, warm = provider.session(graph), provider.session(graph)
    assert (compiled.made, compiled.hits) == (1, 1)
    assert set(nodes_by_provider(cold)) == set(nodes_by_provider(warm)) == {provider.ort_name}
    assert [one.name for one in warm.get_inputs()] == [one.name for one in cold.get_inputs()]


def test_a_graph_has_no_weights_so_that_a_kept_one_is_small(fp32: BlockFolder, tmp_path: Path) -> None:
    graph = stage_graph(fp32.model, 1, 5, PLAIN)
    on("cpu", kept_in(tmp_path)).session(graph)
    (file,) = (tmp_path / "graphs").iterdir()
    assert file.stat().st_size < 2 * len(graph)


def test_another_graph_device_or_version_is_another_key() -> None:
    about = ("CPUExecutionProvider", "1.31.1", "capture=False")
    keys = {
        key_of(graph, words)
        for graph in (b"a", b"b")
        for words in (about, (*about, "driver 1"), (*about, "driver 2"), ("CPUExecutionProvider", "1.31.2", about[2]))
    }
    assert len(keys) == 8


@pytest.mark.parametrize("content", [b"no graph", b""])
def test_what_is_no_graph_is_made_anew(
    fp32: BlockFolder, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    # Given a whole file of ours, with the right key, in which there is no graph
    graph, compiled = stage_graph(fp32.model, 1, 1, PLAIN), kept_in(tmp_path)
    provider = on("cpu", compiled)
    CacheFolder(tmp_path / "graphs").put(key_of(graph, (*provider.identity, "capture=False")), content)
    # Then a session is made all the same, and what is kept is right again
    provider.session(graph)
    assert "CACHE_NOT_BELIEVED" in capsys.readouterr().out and (compiled.made, compiled.hits) == (1, 0)
    provider.session(graph)
    assert (compiled.made, compiled.hits) == (1, 1)


def test_a_full_disk_costs_what_would_have_been_kept(fp32: BlockFolder, tmp_path: Path) -> None:
    compiled = kept_in(tmp_path)
    provider = on("cpu", compiled)
    with no_room(100):
        session = provider.session(stage_graph(fp32.model, 1, 1, PLAIN))
    assert session.get_inputs() and not list((tmp_path / "graphs").iterdir())


def test_a_graph_that_is_wrong_itself_fails_as_without_a_cache(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="INVALID_PROTOBUF"):
        on("cpu", kept_in(tmp_path)).session(b"no graph")
    assert not list((tmp_path / "graphs").iterdir())


def test_a_provider_that_fuses_behind_what_is_written_gets_another_session(fp32: BlockFolder, tmp_path: Path) -> None:
    written: list[Path | None] = []

    class Fusing(CpuProvider):
        fuses_last = True

        def _made(self, graph: bytes, saved: Path | None, **how: bool) -> ort.InferenceSession:
            written.append(saved)
            return super()._made(graph, saved, **how)  # pyright: ignore[reportArgumentType]

    provider = Fusing()
    provider.compiled = kept_in(tmp_path)
    provider.session(stage_graph(fp32.model, 1, 1, PLAIN))
    assert len(written) == 2 and written[0] is not None and written[1] is None


def test_drivers_are_told_a_folder_unless_somebody_has(tmp_path: Path) -> None:
    environment = {"CUDA_CACHE_PATH": "/elsewhere"}
    assert compiled_graphs(tmp_path / "new" / "cache", environment) is not None
    shaders = tmp_path / "new" / "cache" / "shaders"
    assert environment["MESA_SHADER_CACHE_DIR"] == str(shaders) and shaders.stat().st_mode & 0o777 == 0o700
    assert environment["CUDA_CACHE_PATH"] == "/elsewhere"


def test_without_a_folder_drivers_are_told_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(b"")
    environment: dict[str, str] = {}
    assert compiled_graphs(tmp_path / "file", environment) is None and environment == {}
    assert "CACHE_UNUSABLE" in capsys.readouterr().out
