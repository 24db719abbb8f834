"""The options of `blockrelay up` in six groups, with the checks of each. Other commands share the first ones."""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from blockrelay.errors import UsageError
from blockrelay.host.cpu import MAX_RANKS, check_threads
from blockrelay.redis.connections import checked_url
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_launcher.option_groups import OptionGroup, flag, option, switch
from blockrelay_launcher.supervisor.embedded_redis import Fsync
from blockrelay_launcher.up_options.plan_choice import PlanChoice

StandInBy = Literal["imported", "files"]
LOOPBACK = "127.0.0.1"

#: Options of `up` that a topology file replaces.
OF_THE_TOPOLOGY = (
    "stages", "stage_devices", "plan", "strategy", "objective", "profile", "devices", "replicas", "gpu_workers",
    "gpu", "gpu_memory", "gateways", "schedulers", "redis", "payload_redis", "tensor_parallel",
)  # fmt: skip


def absolute(path: Path | None) -> Path | None:
    """Returns the absolute path, because other processes may run in other folders; None stays None."""
    return path and path.absolute()


def _checked_url(url: str | None) -> str | None:
    return url and checked_url(url)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(OptionGroup):
    """The option `--model` of every command that serves a model."""

    TITLE: ClassVar = "Model"
    model: Annotated[
        Path,
        option(
            "PATH",
            "Block folder to serve (see: blockrelay convert).",
            callback=absolute,
            show_default="the bundled model",
        ),
    ] = BUNDLED_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOrBlocksOptions(ModelOptions):
    """The options of commands that also serve ONNX blocks as they are."""

    TITLE: ClassVar = "Model"
    blocks: Annotated[
        Path | None, option("FOLDER", "Use ONNX blocks that you own, as they are, instead of --model.")
    ] = None

    def check(self, given: Set[str]) -> None:
        """Raises UsageError if both a model and blocks are given."""
        if self.blocks is not None and "model" in given:
            raise UsageError("--blocks is instead of --model: give one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModelOptions(ModelOrBlocksOptions):
    """The options of commands that also decide about the context of ONNX blocks."""

    TITLE: ClassVar = "Model"
    max_position: Annotated[int | None, option("N", "With --blocks: length of the context in tokens.", min=1)] = None

    def check(self, given: Set[str]) -> None:
        """Raises UsageError if both a model and blocks are given, and for a context without blocks."""
        ModelOrBlocksOptions.check(self, given)
        if self.blocks is None and self.max_position is not None:
            raise UsageError("--max-position is for --blocks: converting a model decides about its context")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModelOptions(MeasuredModelOptions):
    """The options of `up` about its model."""

    TITLE: ClassVar = "Model"
    other_precision: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Folder of the same checkpoint in another precision, for `blockrelay precision set`; may be repeated.",
        ),
    ] = None
    degrade: Annotated[
        bool,
        flag("--degrade", "With --other-precision: change to a smaller precision where memory lacks, and back again."),
    ] = False
    draft_model: Annotated[
        Path | None,
        option(
            "PATH",
            "Smaller model of the same tokenizer: guesses tokens where it pays; same answers.",
            callback=absolute,
        ),
    ] = None
    stand_in: Annotated[
        StandInBy | None,
        option("imported|files", "With --blocks --gpu: what CPU workers compute with; default: imported, if possible."),
    ] = None
    sequential: Annotated[
        bool, flag("--sequential", "With --blocks: run block after block, with few of them in memory.")
    ] = False
    max_warm_sessions: Annotated[
        int | None, option("N", "With --sequential: most blocks in memory; default: GPU 5, CPU 3.", min=1)
    ] = None
    memory: Annotated[int | None, option("BYTES", "With --sequential: most bytes of the blocks in memory.", min=1)] = (
        None
    )

    def check(self, given: Set[str]) -> None:
        """Raises UsageError for options that need another option, or exclude it."""
        if self.blocks is not None and given & {"model", "topology"}:
            raise UsageError("--blocks is instead of --model and --topology: give one of them")
        for name, value in (("--max-warm-sessions", self.max_warm_sessions), ("--memory", self.memory)):
            if value is not None and not self.sequential:
                raise UsageError(f"{name} is for --sequential")
        if odd := [path for path in self.other_precision or () if "," in str(path.absolute())]:
            raise UsageError(f"--other-precision {odd[0]}: a path with a comma cannot be given to workers; rename it")
        if self.degrade and not self.other_precision:
            raise UsageError("--degrade needs --other-precision, the folder of a smaller precision to change to")
        if self.blocks is not None and self.other_precision:
            raise UsageError("--other-precision is for --model: ONNX blocks have one precision")
        if self.blocks is not None and self.draft_model is not None:
            raise UsageError("--draft-model is for --model: no tokens are guessed for ONNX blocks as they are")
        if self.blocks is None and self.sequential:
            raise UsageError("--sequential is for --blocks: other models are cut into stages")
        MeasuredModelOptions.check(self, given)

    def check_stand_in(self, *, gpus: bool) -> None:
        """Raises UsageError for `--stand-in` without `--blocks`, without GPUs (not `gpus`), or with `--sequential`."""
        if self.stand_in is not None and (self.blocks is None or not gpus or self.sequential):
            raise UsageError("--stand-in is for --blocks with --gpu, and not for --sequential")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyOptions(OptionGroup):
    """The options of `up` about what runs where: stages, their devices, and the number of services."""

    TITLE: ClassVar = "Topology"
    stages: Annotated[int, option("N", "Number of stages that the model is cut into.", min=1)] = 1
    stage_devices: Annotated[
        str, option("CLASSES", "Class of device for each of --stages, gpu or cpu: gpu,cpu,gpu.")
    ] = ""
    plan: Annotated[
        Path | None,
        option("FILE", "Use the stages of this plan (blockrelay plan --json) instead of --stages.", callback=absolute),
    ] = None
    strategy: Annotated[
        str | None,
        option(
            "NAME", "Let this strategy plan the stages; for its other options use blockrelay plan --json and --plan."
        ),
    ] = None
    objective: Annotated[str | None, option("AIM", "With --strategy: latency or throughput.")] = None
    profile: Annotated[Path | None, option("FILE", "With --strategy: the file that blockrelay profile wrote.")] = None
    devices: Annotated[Path | None, option("FILE", "With --strategy: file of the devices; default: this machine.")] = (
        None
    )
    topology: Annotated[
        Path | None, option("FILE", "File of all hosts, their devices and roles; --host names this host in it.")
    ] = None
    replicas: Annotated[int, option("N", "Number of CPU workers per stage.", min=1)] = 1
    tensor_parallel: Annotated[
        int,
        option("N", "Processes that share the stage of each CPU worker, --threads threads each.", min=1, max=MAX_RANKS),
    ] = 1
    gateways: Annotated[int, option("N", "Number of gateways, on consecutive ports; clients may use any.", min=1)] = 1
    schedulers: Annotated[
        int, option("N", "Number of schedulers; one is enough, with more the system survives the death of one.", min=1)
    ] = 1

    def check(self, given: Set[str]) -> None:
        """Raises UsageError for options that the topology file replaces."""
        for name in OF_THE_TOPOLOGY if self.topology is not None else ():
            if name in given:
                raise UsageError(f"--{name.replace('_', '-')} and --topology: the file says what runs where")

    @property
    def first_plan(self) -> PlanChoice:
        """The choice of the first plan."""
        return PlanChoice(
            stages=self.stages, stage_devices=self.stage_devices, plan=self.plan, strategy=self.strategy,
            objective=self.objective, profile=self.profile, devices=self.devices,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions(OptionGroup):
    """The options of `up` that choose GPUs."""

    TITLE: ClassVar = "Devices"
    gpu_workers: Annotated[
        int, option("N", "Run workers on the first N GPUs of blockrelay devices, instead of --gpu.", min=0)
    ] = 0
    gpu: Annotated[str, option("ID,ID", "Run workers on these GPUs, such as webgpu:0 (blockrelay devices).")] = ""

    @property
    def named(self) -> list[str]:
        """The names in `--gpu`."""
        return list(filter(None, self.gpu.split(",")))

    def check(self, given: Set[str]) -> None:
        """Raises UsageError if both names and a number are given, and for a limit of GPU memory without GPUs."""
        if self.gpu_workers and self.gpu:
            raise UsageError("--gpu and --gpu-workers: the one names GPUs, the other takes the first ones")
        if "gpu_memory" in given and not (self.gpu_workers or self.named):
            raise UsageError("--gpu-memory needs --gpu: CPU workers have BLOCKRELAY_KV_BYTES")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions(OptionGroup):
    """The options of `up` that limit threads and memory."""

    TITLE: ClassVar = "Limits"
    threads: Annotated[
        int | None,
        option(
            "N", "Threads per worker; default: the cores, shared by one stage's workers.", min=1, callback=check_threads
        ),
    ] = None
    gpu_memory: Annotated[
        int | None,
        option(
            "BYTES", "Most bytes of each GPU's memory for weights and KV pages; default: most of what is free.", min=1
        ),
    ] = None
    page_store_bytes: Annotated[
        int | None,
        option("N", "Bytes of KV pages shared in /dev/shm; 0: none; default: 1/8 of the free memory.", min=0),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions(OptionGroup):
    """The options of `up` about addresses: its gateways, those who may use them, and Redis."""

    TITLE: ClassVar = "Network"
    host: Annotated[
        str | None,
        option("HOST", "Address of the gateway; default: 127.0.0.1. With --topology: name of this host in the file."),
    ] = None
    port: Annotated[int, option("N", "Port of the first gateway; 0 picks a free one.", min=0, max=65535)] = 8000
    redis: Annotated[
        str | None,
        option("URL", "Control Redis to use (AOF, fsync always) instead of an embedded one.", callback=_checked_url),
    ] = None
    payload_redis: Annotated[
        str | None,
        option(
            "URL", "Redis for activations between stages, without AOF; default: that of --redis.", callback=_checked_url
        ),
    ] = None
    api_keys: Annotated[
        Path | None, option("FILE", "Accept only API keys of this file (see: blockrelay keys).", callback=absolute)
    ] = None
    cors_origins: Annotated[
        str | None, option("URL,...", "Origins of web pages that may use the gateway; with API keys also *.")
    ] = None
    allowed_hosts: Annotated[
        str | None, option("NAME,...", "Host names that the gateway accepts, besides localhost; *: any.")
    ] = None
    root_path: Annotated[
        str | None, option("PATH", "Path prefix under which a proxy publishes the gateway, such as /llm.")
    ] = None

    @property
    def address(self) -> str:
        """The address that gateways listen on; with `--topology` only after `options_for` has replaced `host`."""
        return self.host or LOOPBACK

    def check(self, given: Set[str]) -> None:
        """Raises UsageError for a payload Redis beside the embedded control Redis."""
        if self.payload_redis and not self.redis:
            raise UsageError("--payload-redis needs --redis: the embedded Redis brings its own")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvancedOptions(OptionGroup):
    """The options of `up` about its data folder, optimisations and output."""

    TITLE: ClassVar = "Advanced"
    data: Annotated[
        Path | None, option("DIR", "Keep accepted requests in this folder and continue them at the next start.")
    ] = None
    fsync: Annotated[
        Fsync,
        option("always|everysec", "When the embedded Redis syncs to disk; with everysec a crash loses up to 2 s."),
    ] = "always"
    speculation: Annotated[bool, switch("Draft repeated text ahead (speculation); same answers.")] = True
    prefix_cache: Annotated[bool, switch("Reuse KV pages of prompts with the same beginning.")] = True
    verbose: Annotated[bool, flag("--verbose", "Write every log line to stderr, not only errors.")] = False
