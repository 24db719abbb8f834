"""Workers that can serve a model in two precisions, as schedulers see them."""

from typing import Any

from blockrelay.protocol.plan import WorkerInfo
from blockrelay.protocol.planned_split import equal_parts
from blockrelay.protocol.served_folder import ServedFolder

MODEL, OTHER = "m" * 16, "n" * 16
BOTH = tuple(
    ServedFolder(key=key, precision=precision, kv_cache_layout="fp16")
    for key, precision in ((MODEL, "w8a8"), (OTHER, "w4a8"))
)


def worker(name: str, stage: int | None, stages: int = 1, folder: str = MODEL, **more: Any) -> WorkerInfo:
    planned = equal_parts(4, stages)
    fields: dict[str, Any] = {
        "id": name, "model": MODEL, "device": "cpu", "numerics": folder, "host": "h", "pid": 1, "port": 0,
        "registered_ms": 1, "folder": folder, "folders": BOTH, "stage": stage, "ready": stage is not None,
        "split": planned.text if stage is not None else "",
    }  # fmt: skip
    return WorkerInfo(**{**fields, **more})
