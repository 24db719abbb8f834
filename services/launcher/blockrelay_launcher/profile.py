"""Measures the time of blocks, hops and steps on this machine, for planners (`blockrelay profile`).

A process with the worker's own code measures blocks and hops; hops go over a payload Redis like that of `up`. The
overhead of a step is the difference between a whole system of one stage and its blocks. The overhead of a hop (two
processes that wake up and read a message) is the difference between a system of two stages and one of one stage.
"""

import random
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Literal

from blockrelay.block_folder.analysis import HOP_ITEM_BYTES
from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.errors import OnnxBlocksError
from blockrelay.host.child_command import module_command
from blockrelay.host.cpu import cores
from blockrelay.host.memory import available_bytes
from blockrelay.onnx_blocks.handed_on import bytes_handed_on
from blockrelay.onnx_blocks.served_shape import served_wiring
from blockrelay.planning.cuts import check_stages
from blockrelay.planning.profile import Hop, Profile, StepOverhead, read_profile_file
from blockrelay.protocol.plan import uniform_split
from blockrelay_launcher.background import running_redis, running_up
from blockrelay_launcher.bench.figures import decode_rate, random_prompts
from blockrelay_launcher.bench.targets import GatewaySide
from blockrelay_launcher.policy import PROFILE_MEMORY_SHARE

#: Requests at once, rounds, new tokens and prompt tokens of the measurement of a step's overhead.
REQUESTS, ROUNDS, NEW = (1, 4, 16), 3, 64
PROMPT = 96


def run_profile(
    model: Path,
    out: Path,
    *,
    threads: int | None,
    tensor_parallel: int = 1,
    gpu: str = "",
    form: Literal["full", "source"] = "full",
) -> int:
    """Writes the profile of the CPU and of the devices `gpu` (ids, comma-separated) to `out`, returns the exit code.

    `model` is the block folder. In the form `source` the profile has only the seconds of one token in each block.
    `threads` None: all cores, shared by the `tensor_parallel` processes of a stage. Raises BlockFolderError for a wrong
    block folder, ServiceUnavailable if Redis or a measured system does not start.
    """
    folder = open_block_folder(model, blocks=[])
    threads = threads or max(1, cores() // tensor_parallel)
    with running_redis(durable=False) if form == "full" else nullcontext() as url:
        argv = module_command("blockrelay_worker.offline.profiling", "--model", model, "--out", out, "--form", form)
        argv += ["--threads", str(threads), "--tensor-parallel", str(tensor_parallel)]
        argv += ["--gpu", gpu] if gpu else []
        argv += ["--redis", url] if url else []
        done = subprocess.run(argv, check=False)
    if done.returncode or form == "source":
        return done.returncode
    profile = read_profile_file(out)
    if _new_tokens(folder) > 0 and _has_room(folder, profile):
        out.write_text(_with_systems(profile, folder, threads, tensor_parallel).encode())
    return 0


def _has_room(folder: BlockFolder, profile: Profile) -> bool:
    """True if a whole system may serve all blocks on the CPU. ONNX blocks may need more memory than there is."""
    sizes = [classes["CPU"].bytes or 0 for classes in profile.blocks.values()]
    return folder.model.onnx_blocks is None or sum(sizes) < available_bytes() * PROFILE_MEMORY_SHARE


def _with_systems(profile: Profile, folder: BlockFolder, threads: int, ranks: int) -> Profile:
    """Returns the profile with the overheads of steps and hops, measured with whole systems."""
    one, spread = _step_seconds(folder, 1, threads, ranks)
    new = _new_tokens(folder)
    blocks = {r: sum(block["CPU"].at(r, PROMPT + new / 2) for block in profile.blocks.values()) for r in REQUESTS}
    step = fitted([(r, one[r] - blocks[r]) for r in REQUESTS])
    profile = replace(profile, step=replace(step, spread=spread))
    row_bytes = _row_bytes(folder)
    if not row_bytes:
        return profile
    two, spread_of_two = _step_seconds(folder, 2, threads, ranks)
    # Stages with cores of their own work at the same time on parts of the requests: only a single request shows a hop.
    alone = 2 * threads * ranks <= cores()
    extra = [(r, two[r] - one[r]) for r in REQUESTS if r == 1 or not alone]
    hop = fitted_hop(extra, profile.hop["redis"], row_bytes=row_bytes)
    return replace(profile, hop={**profile.hop, "redis": replace(hop, spread=spread_of_two)})


def _row_bytes(folder: BlockFolder) -> int:
    """Returns the bytes of one token from the first of two stages to the second; 0 if two stages are impossible."""
    blocks = folder.model.blocks
    if folder.model.onnx_blocks is None:
        return HOP_ITEM_BYTES * folder.model.hidden_size
    if blocks == 1:
        return 0
    stages = uniform_split(blocks, 2)
    try:
        check_stages(folder, stages)
    except OnnxBlocksError:
        return 0
    return bytes_handed_on(served_wiring(folder.root), stages[0].last, new=1, past=PROMPT)


def _new_tokens(folder: BlockFolder) -> int:
    return min(NEW, folder.model.max_position - PROMPT)


def _step_seconds(folder: BlockFolder, stages: int, threads: int, ranks: int) -> tuple[dict[int, float], float]:
    """Returns the seconds of a step of a whole system with `stages` stages, by number of requests, and their spread.

    The spread is the median distance of a round's rate from the median rate, as a share of it; the largest counts.
    """
    by_requests: dict[int, float] = {}
    spread = 0.0
    dice = random.Random(time.time_ns())
    sizes = ["--threads", str(threads), "--tensor-parallel", str(ranks)]
    with (
        running_up(folder.root.absolute(), stages, *sizes, "--no-speculation") as url,
        closing(GatewaySide(url, folder.model.name)) as gateway,
    ):
        for requests in REQUESTS:
            rates: list[float] = []
            for _ in range(ROUNDS + 1):
                prompts = random_prompts(dice, folder.model.vocab_size, requests, PROMPT)
                rates.append(decode_rate(gateway.round(prompts, _new_tokens(folder)).tokens))
            typical = median(rates[1:])
            by_requests[requests] = requests / typical
            spread = max(spread, median(abs(rate - typical) for rate in rates[1:]) / typical)
    return by_requests, spread


def fitted(beside: Sequence[tuple[int, float]]) -> StepOverhead:
    """Returns the straight line through points (requests, seconds beside the blocks) by least squares, at least 0.

    The points must have two or more different numbers of requests.
    """
    count = len(beside)
    mean_x, mean_y = sum(x for x, _ in beside) / count, sum(y for _, y in beside) / count
    slope = sum((x - mean_x) * (y - mean_y) for x, y in beside) / sum((x - mean_x) ** 2 for x, _ in beside)
    slope = max(slope, 0.0)
    return StepOverhead(seconds=max(mean_y - slope * mean_x, 0.0), seconds_per_row=slope)


def fitted_hop(extra: Sequence[tuple[int, float]], carried: Hop, *, row_bytes: int) -> Hop:
    """Returns a hop's cost from the time that two stages need beyond one, as points (requests, seconds).

    There is one point, or points with different numbers of requests. A step has one hop with the activations and one
    back. `carried` is the measured cost of the bytes alone, the lower limit of the result. `row_bytes` is the number of
    bytes that a hop carries for one token, above 0.
    """
    if len(extra) == 1:
        [(requests, seconds)] = extra
        per_byte = carried.seconds_per_byte
        there_and_back = seconds - requests * row_bytes * per_byte
    else:
        line = fitted(extra)
        per_byte, there_and_back = max(line.seconds_per_row / row_bytes, carried.seconds_per_byte), line.seconds
    return Hop(seconds=max(there_and_back / 2, carried.seconds), seconds_per_byte=per_byte)
