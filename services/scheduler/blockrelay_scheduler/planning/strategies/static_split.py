"""Strategy `static-split`: blocks 1 to k on the CPU and the others on the GPU, for the best k."""

from math import fsum

from blockrelay.errors import UsageError
from blockrelay.quantities import counted, format_seconds
from blockrelay.typed_command import typed
from blockrelay_scheduler.planning.problem import Part, Placement, Problem

CPU, GPU = "CPU", "GPU"
_REMEDIES = {CPU: "", GPU: f": measure one ({typed('profile --gpu ID')}), or describe it (--devices)"}


def static_split(problem: Problem) -> Placement:
    """Returns the placement with the lowest `max(cpu_time, gpu_time)`; of equal ones that with the smallest k.

    Both times are seconds for one token at half the promised context. The GPU is the first device of the class GPU, or
    else the first that is no CPU, such as webgpu:0. The notes of the placement are `k`, `pipeline_time`, `cpu_time`,
    `gpu_time`, and `summary`, a sentence. Memory is not looked at. Raises UsageError unless there is a CPU and a GPU.
    `CostModel.check` must have accepted the fleet, as `place` sees to: the speeds of both devices are needed.
    """
    devices = problem.fleet.devices
    cpu = next((one for one in devices if one.device_class == CPU), None)
    gpu = next((one for one in devices if one.device_class == GPU), None)
    gpu = gpu or next((one for one in devices if one.device_class != CPU), None)
    if cpu is None or gpu is None:
        lacking = CPU if cpu is None else GPU
        raise UsageError(f"static-split needs a {lacking}, and there is none{_unmeasured(problem, lacking)}")
    context = problem.promise.context / 2
    on_cpu = problem.costs.each_block_seconds(cpu, 1, context)
    on_gpu = problem.costs.each_block_seconds(gpu, 1, context)

    def times(k: int) -> tuple[float, float]:
        return fsum(on_cpu[:k]), fsum(on_gpu[k:])  # exact sums, so that equal times compare as equal

    k = min(range(problem.blocks + 1), key=lambda k: max(times(k)))
    cpu_time, gpu_time = times(k)
    parts: list[Part] = []
    if k:
        reason = f"{format_seconds(cpu_time)} on {cpu.id} while {gpu.id} takes {format_seconds(gpu_time)}"
        parts.append(Part(first=1, last=k, devices=(cpu.id,), reason=reason))
    if k < problem.blocks:
        reason = f"{format_seconds(gpu_time)} on {gpu.id} while {cpu.id} takes {format_seconds(cpu_time)}"
        parts.append(Part(first=k + 1, last=problem.blocks, devices=(gpu.id,), reason=reason))
    summary = f"k = {k}: {counted(k, 'block')} on the CPU, {problem.blocks - k} on the GPU; the slower takes "
    summary += format_seconds(max(times(k)))
    notes = {
        "k": k, "pipeline_time": max(times(k)), "cpu_time": cpu_time, "gpu_time": gpu_time, "summary": summary,
    }  # fmt: skip
    return Placement(parts=tuple(parts), notes=notes)


def _unmeasured(problem: Problem, name: str) -> str:
    """Says why no device of a class is there, and what to do: its times lack a block, or nothing was measured."""
    profile = problem.costs.profile
    blocks = profile.blocks if profile is not None else {}
    lacking = [block for block, classes in blocks.items() if name not in classes]
    if 0 < len(lacking) < len(blocks):
        return f" that was measured for every block: the profile lacks {lacking[0]} on {name}"
    return _REMEDIES[name]
