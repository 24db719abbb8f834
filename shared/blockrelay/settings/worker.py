"""The settings of a worker."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from blockrelay.errors import UsageError
from blockrelay.host.cpu import MAX_RANKS, check_threads
from blockrelay.protocol.plan import GPU, Device
from blockrelay.settings.common import Settings

GraphMode = Literal["max-autotune", "use-graph-cache", "reduce-overhead", "enforce-eager"]

#: How free KV pages are chosen for a request.
PageAllocation = Literal["first-fit", "best-fit"]


class WorkerSettings(Settings):
    device: Device = Field(
        default="cpu", description="class of the device; gpu needs `gpu`; default: gpu if `gpu` is set, else cpu"
    )
    gpu: str = Field(default="", description="GPU to compute on, such as webgpu:0 (see `blockrelay devices`)")
    gpu_fallbacks: str = Field(
        default="auto",
        pattern=r"^([\w.:-]+(, *[\w.:-]+)*)?$",
        description="devices, by commas, that replace that GPU if its sessions cannot be created or run; auto: those "
        "of the host that no other worker has; empty: none",
    )
    gpu_stages: int = Field(
        default=1,
        ge=1,
        le=64,
        description="workers on that GPU in this process, each with its own stage; also on a CPU that runs ONNX blocks "
        "made by others as they are",
    )
    gpu_python: str = Field(default="", description="Python that has the packages of that GPU; default: this one")
    per_block: bool = Field(default=False, description="run a GPU's blocks one by one, to measure each in every step")
    cache_dir: Path | None = Field(
        default=None,
        description="folder for optimised graphs and shaders of GPUs; default: blockrelay in the user's cache folder",
    )
    graph_mode: GraphMode | None = Field(
        default=None,
        description="how much of a GPU's graphs is compiled, by names of other projects (docs/gpu.md); default: all",
    )
    use_graph_cache: bool | None = Field(
        default=None,
        description="keep optimised graphs of GPUs for the next start; default: as graph_mode says",
    )
    enforce_eager: bool = Field(
        default=False, description="neither keep optimised graphs of GPUs nor record decode steps on them"
    )
    canary_s: float = Field(default=600.0, gt=0, description="seconds between two known answers that a GPU must give")
    gpu_memory: int | None = Field(
        default=None,
        ge=1,
        description="bytes on that GPU for weights and KV pages of all its stages; default: most of the memory that "
        "it reports as free; if it reports none, kv_bytes for the pages",
    )
    sequential: bool = Field(
        default=False, description="run ONNX blocks made by others one by one, with only a few of them in memory"
    )
    max_warm_sessions: int | None = Field(
        default=None,
        ge=1,
        description="most blocks that a sequential worker has in memory at once; default: by warm_session_bytes, else "
        "5 on a GPU, 3 on a CPU, and fewer if memory is short",
    )
    warm_session_bytes: int | None = Field(
        default=None, ge=1, description="most bytes of these blocks; one block is always allowed"
    )
    imported_model: Path | None = Field(
        default=None,
        description="block folder that was imported from the ONNX blocks of `model`: CPU workers compute with it",
    )
    device_id: str = Field(
        default="",
        pattern="^[A-Za-z0-9_.:-]{0,64}$",
        description="name of the device in plans, such as gpu:0; the worker takes stages that name it; default: gpu",
    )
    other_precisions: str = Field(
        default="",
        description="block folders of the same checkpoint in other precisions, by commas: `blockrelay precision set` "
        "changes to them while requests run",
    )
    port: int = Field(default=0, ge=0, le=65535, description="port of metrics and health; 0: a free one")
    threads: int = Field(default=1, ge=1, description="threads of the kernels, at most 4 for each core of the machine")
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=MAX_RANKS,
        description="processes (ranks) that compute the worker's stage together, each with `threads` threads and a "
        "share of the weights and KV pages; for w8a8 and w4a8 on CPUs of one Linux host",
    )
    local_rows: Literal["on", "off"] = Field(
        default="on", description="hidden states to workers of this host by shared memory (Linux); off: all by Redis"
    )
    max_rows: int = Field(default=512, ge=1, description="most tokens of one batch: decode steps plus prompt chunks")
    step_target_s: float = Field(default=0.5, gt=0, description="seconds between tokens that prompts may cause")
    speculation: Literal["on", "off"] = Field(default="on", description="speculative decoding (exact precisions)")
    draft_model: Path | None = Field(
        default=None,
        description="block folder of a smaller model with the same tokenizer, which guesses tokens where it pays "
        "(docs/performance.md); for CPU workers",
    )
    draft_tokens: int | None = Field(
        default=None, ge=0, le=8, description="guesses of the draft model for each token; default: as many as pay"
    )
    inexact_sharing: Literal["off", "on"] = Field(
        default="off",
        description="on: a GPU with the whole model shares KV pages between requests of a tenant and decodes "
        "speculatively, as vLLM does; other requests then change the last digits",
    )
    max_requests: int = Field(default=64, ge=1, description="most requests that this worker runs at once")
    kv_bytes: int | None = Field(default=None, ge=1, description="bytes of KV pages; default: a share of free memory")
    page_allocation: PageAllocation = Field(
        default="first-fit", description="give a request the KV pages of the lowest numbers, or consecutive ones"
    )
    prefix_cache: bool = Field(default=True, description="share KV pages of equal beginnings (exact precisions)")
    page_store_folder: Path | None = Field(default=None, description="shared KV pages of this host, under /dev/shm")
    page_store_bytes: int = Field(default=1 << 30, ge=0, description="most bytes of KV pages in that folder")
    swap_folder: Path | None = Field(
        default=None,
        description="folder on a disk for KV pages of preempted requests; workers of one host share it, and the first "
        "one removes older pages; default: none",
    )
    swap_bytes: int = Field(default=8 << 30, ge=1, description="most bytes of KV pages in that folder")
    page_store_redis_bytes: int = Field(default=0, ge=0, description="bytes of KV pages on the payload Redis; 0: none")
    page_store_ttl_s: int = Field(default=900, ge=1, description="seconds until unused KV pages leave that Redis")
    beat_s: float = Field(default=0.5, gt=0, description="seconds between two heartbeats")
    session_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="seconds after which a step (of ONNX blocks made by others: a block) ends the process, unless its "
        "tokens should take longer by earlier measurements",
    )
    max_retry_attempts: int = Field(
        default=3,
        ge=1,
        description="attempts to create and run a session of ONNX Runtime if the failure may be temporary; all begin "
        "within session_timeout_s",
    )
    drain_s: float = Field(
        default=5.0,
        ge=0,
        description="seconds after SIGTERM in which requests may end; the others continue on other workers",
    )
    inject_speed: float = Field(
        default=1.0, gt=0, le=1, description="share of its speed at which the worker computes (simulations)"
    )
    inject_memory: Path | None = Field(
        default=None, description="file with the number of bytes that count as free memory, while it exists (tests)"
    )
    inject_numerics: str = Field(
        default="",
        pattern="^[a-z0-9]{0,16}$",
        description="compute other bits, under a numerics id that ends in this (tests)",
    )

    @property
    def named_device(self) -> str:
        """The name of the device in plans; "": it has none."""
        return self.device_id or self.gpu

    @property
    def other_folders(self) -> tuple[Path, ...]:
        """The paths in `other_precisions`."""
        return tuple(Path(part.strip()) for part in self.other_precisions.split(",") if part.strip())

    @model_validator(mode="before")
    @classmethod
    def _with_class(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Sets the class `gpu` where only a GPU is named."""
        return given | {"device": GPU} if given.get("gpu") and "device" not in given else given

    @field_validator("threads")
    @classmethod
    def _are_of_use(cls, value: int) -> int:
        try:
            check_threads(value)
        except UsageError as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator("graph_mode", mode="before")
    @classmethod
    def _is_mode(cls, value: object) -> object:
        """Accepts the spelling of programs too: `MAX_AUTOTUNE` for max-autotune."""
        return value.lower().replace("_", "-") if isinstance(value, str) else value
