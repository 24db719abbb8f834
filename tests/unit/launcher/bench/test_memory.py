"""Weighing workers: what the kernel says against what the manifest says."""

from pathlib import Path

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_launcher.bench.memory import WorkerMemory, heaviest, page_bytes, parse_status, weight_bytes


def weight(worker_id: str, *, kv: int, anon: int = 100, stage: int = 0) -> WorkerMemory:
    return WorkerMemory(
        worker=worker_id, stage=stage, rss_anon=anon, rss_shmem=20, rss_file=7, peak_rss=150, weights=60, kv=kv
    )  # fmt: skip


def test_the_kernels_sizes_are_bytes() -> None:
    text = "Name:\tpython\nVmHWM:\t     300 kB\nRssAnon:\t     200 kB\nRssShmem:\t       4 kB\nThreads:\t3\n"
    assert parse_status(text) == {"VmHWM": 300 << 10, "RssAnon": 200 << 10, "RssShmem": 4 << 10}
    assert parse_status(Path("/proc/self/status").read_text())["RssAnon"] > 1 << 20


def test_mapped_files_do_not_count() -> None:
    assert weight("a", kv=40).entry()["ratio"] == 1.2


def test_a_worker_counts_when_it_holds_most() -> None:
    seen = [weight("b", kv=1, stage=1), weight("a", kv=5), weight("a", kv=9, anon=1), weight("a", kv=9, anon=2)]
    assert [(w.worker, w.kv, w.rss_anon) for w in heaviest(seen)] == [("a", 9, 2), ("b", 1, 100)]


def test_stages_together_weigh_what_the_model_weighs() -> None:
    manifest = open_block_folder(BUNDLED_MODEL, blocks=[]).manifest
    blocks, model = manifest.model.blocks, manifest.model
    whole = weight_bytes(manifest, 1, blocks)
    assert whole == weight_bytes(manifest, 1, 2) + weight_bytes(manifest, 3, blocks)
    assert 0 < whole <= sum(manifest.files[block.file].bytes for block in manifest.blocks)
    assert page_bytes(manifest, 1, blocks) == 2 * model.layers * model.kv_heads * model.head_dim * 16 * 2
    assert page_bytes(manifest, blocks, blocks) == 0  # the head keeps nothing
