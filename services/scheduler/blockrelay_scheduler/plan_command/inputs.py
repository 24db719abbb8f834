"""What a plan is decided from, read from files and options. UsageError and BlockFolderError say what is wrong."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.model import ungroupable
from blockrelay.block_folder.precisions import parse_precisions
from blockrelay.bounded_file import read_bounded
from blockrelay.errors import UsageError
from blockrelay.host.cpu import cpu_name, is_here
from blockrelay.host.memory import allowed_bytes
from blockrelay.planning.costs import costs_of
from blockrelay.planning.cuts import check_stages
from blockrelay.planning.devices import Device, Fleet, decode_fleet
from blockrelay.planning.profile import Profile, read_profile_file
from blockrelay_scheduler.planning.cost_model import CostModel
from blockrelay_scheduler.planning.problem import NO_WISHES, Objective, Problem, Promise, Wishes
from blockrelay_scheduler.policy import DEFAULT_CONTEXT, DEFAULT_REQUESTS, MACHINE_MEMORY_SHARE

#: Larger files describe no fleet.
_MAX_BYTES = 16 << 20

#: Of a CPU that nobody measured.
GUESSED_BYTES_PER_SECOND, GUESSED_OPERATIONS_PER_SECOND = 2e10, 2e11


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What every `plan` command takes."""

    model: Path
    profile: Path | None = None
    devices: Path | None = None
    objective: Objective = "throughput"
    context: int | None = None
    requests: int = DEFAULT_REQUESTS
    precision: str | None = None
    """As if the model had been converted to it; written as for `convert`."""
    wishes: Wishes = NO_WISHES


def read_problem(options: PlanOptions) -> Problem:
    """The problem that the options describe."""
    folder = open_block_folder(options.model, blocks=[])
    analysis = costs_of(folder)
    precisions = measured_in = folder.manifest.precisions
    if options.precision is not None:
        if folder.model.onnx_blocks is not None:
            raise UsageError(f"--precision: {analysis.model} is ONNX blocks as they are, which have their own")
        precisions = parse_precisions(options.precision, folder.model.blocks)
        if (odd := ungroupable(folder.model, precisions)) is not None:
            raise UsageError(f"--precision: {analysis.model} cannot have {odd[0]}")
    profile = read_profile(options.profile, folder) if options.profile else None
    if options.devices:
        fleet = decode_fleet(read_bounded(options.devices, _MAX_BYTES), str(options.devices))
    else:
        fleet = this_machine(profile, str(options.profile))
    context = options.context or min(folder.model.max_position, DEFAULT_CONTEXT)
    if context > folder.model.max_position:
        raise UsageError(f"--context {context} is beyond the model's context of {folder.model.max_position}")
    return Problem(
        analysis=analysis,
        fleet=fleet,
        costs=CostModel(analysis, precisions, profile, measured_in),
        objective=options.objective,
        promise=Promise(context=context, requests=options.requests),
        wishes=options.wishes,
        check_cut=partial(check_stages, folder),
        guessed=not options.devices and profile is None,
    )


def read_profile(path: Path, folder: BlockFolder) -> Profile:
    """The profile in a file. UsageError when it is of another model."""
    profile = read_profile_file(path)
    if profile.model_hash and profile.model_hash != folder.manifest.model_hash:
        where = folder.onnx_root or folder.root
        with_what = "" if folder.model.onnx_blocks is None else ", with the same files and --max-position"
        raise UsageError(
            f"{path}: measured with another model ({profile.model}, {profile.model_hash[:12]}) than {where} "
            f"({folder.model.name}, {folder.manifest.model_hash[:12]}); profile it again{with_what}"
        )
    return profile


def this_machine(profile: Profile | None, where: str) -> Fleet:
    """A device for each class of the profile; without one this machine's CPU, guessed. UsageError for a profile of
    another machine, and for one without a class of which it knows every block."""
    memory = int(allowed_bytes() * MACHINE_MEMORY_SHARE)
    if profile is None:
        cpu = Device(
            id="cpu:0",
            device_class="CPU",
            host="localhost",
            memory_bytes=memory,
            bytes_per_second=GUESSED_BYTES_PER_SECOND,
            operations_per_second=GUESSED_OPERATIONS_PER_SECOND,
        )
        return Fleet(devices=(cpu,))
    if profile.machine and not is_here(profile.machine):
        raise UsageError(
            f"{where}: measured on another machine ({profile.machine}) than this one ({cpu_name()}); "
            "profile it here, or say with --devices which machines the plan is for"
        )
    if not profile.classes:
        known = sorted({name for classes in profile.blocks.values() for name in classes})
        lacking = [next(block for block, classes in profile.blocks.items() if name not in classes) for name in known]
        said = ", ".join(f"{name} lacks {block}" for name, block in zip(known, lacking, strict=True))
        raise UsageError(f"{where}: no class of devices was measured for every block ({said})")
    return Fleet(
        devices=tuple(
            Device(
                id=name if ":" in name else f"{name.lower()}:0",
                device_class=name,
                host="localhost",
                memory_bytes=memory if name == "CPU" else None,
            )
            for name in profile.classes
        )
    )
