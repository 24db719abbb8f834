"""Reads the inputs of a plan from files and options: model, profile, devices, and what the user wants.

All functions raise UsageError or BlockFolderError for inputs that cannot be used.
"""

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
from blockrelay_scheduler.policy import (
    DEFAULT_CONTEXT,
    DEFAULT_REQUESTS,
    GUESSED_BYTES_PER_SECOND,
    GUESSED_OPERATIONS_PER_SECOND,
    MACHINE_MEMORY_SHARE,
)

#: Most bytes of a file of devices; a larger one describes no fleet.
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options that `plan` and `plan what-if` have in common."""

    model: Path
    """The block folder."""
    profile: Path | None = None
    """The file of measured times; None: none were measured."""
    devices: Path | None = None
    """The file of devices and links; None: this machine."""
    objective: Objective = "throughput"
    """What the strategy `auto` optimises; other strategies ignore it."""
    context: int | None = None
    """Tokens of each request that KV pages must have room for; None: DEFAULT_CONTEXT, or the model's if shorter."""
    requests: int = DEFAULT_REQUESTS
    """Requests at once that KV pages must have room for."""
    precision: str | None = None
    """The precision to plan for, written as for `convert`; None: the one that the model has."""
    wishes: Wishes = NO_WISHES


def read_problem(options: PlanOptions) -> Problem:
    """Reads the files that `options` name and returns the planning problem."""
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
    """Returns the profile in a file. Raises UsageError when it was measured with another model than `folder`.

    A profile of the short form does not say of which model it is, and is not checked here.
    """
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
    """Returns one device of this machine for each class of the profile, or without a profile a CPU of assumed speed.

    A CPU has MACHINE_MEMORY_SHARE of the memory that this process may use; the memory of other devices is unknown.
    Raises UsageError for a profile of another machine, and for one that has no class with a time for every block. A
    profile that names no machine is taken to be of this one. `where` names the profile in messages.
    """
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
        gaps = ", ".join(f"{name} lacks {block}" for name, block in zip(known, lacking, strict=True))
        raise UsageError(f"{where}: no class of devices was measured for every block ({gaps})")
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
