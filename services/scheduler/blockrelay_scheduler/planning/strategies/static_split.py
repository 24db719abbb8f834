"""`static-split`: blocks 1 to k on the CPU, the others on the GPU; every k is tried."""

from math import fsum

from blockrelay.errors import UsageError
from blockrelay.planning.devices import Device
from blockrelay_scheduler.planning.problem import Part, Placement, Problem


def static_split(problem: Problem) -> Placement:
    """The smallest k of those with the lowest `max(cpu_time, gpu_time)`, both of one row at the base context.

    Notes: `k`, `pipeline_time`, `cpu_time`, `gpu_time`, and `summary`, a sentence. UsageError unless there is a device
    of each class.
    """
    cpu, gpu = _first(problem, "CPU"), _first(problem, "GPU")
    context = problem.promise.context / 2
    on_cpu = problem.costs.each_block_seconds(cpu, 1, context)
    on_gpu = problem.costs.each_block_seconds(gpu, 1, context)

    def times(k: int) -> tuple[float, float]:
        return fsum(on_cpu[:k]), fsum(on_gpu[k:])  # equal times must be equal numbers

    k = min(range(problem.blocks + 1), key=lambda k: max(times(k)))
    cpu_time, gpu_time = times(k)
    parts: list[Part] = []
    if k:
        reason = f"{1000 * cpu_time:.3g} ms on {cpu.id} beside {1000 * gpu_time:.3g} ms on {gpu.id}"
        parts.append(Part(first=1, last=k, devices=(cpu.id,), reason=reason))
    if k < problem.blocks:
        reason = f"{1000 * gpu_time:.3g} ms on {gpu.id} beside {1000 * cpu_time:.3g} ms on {cpu.id}"
        parts.append(Part(first=k + 1, last=problem.blocks, devices=(gpu.id,), reason=reason))
    summary = f"k = {k}: {k} blocks on the CPU, {problem.blocks - k} on the GPU, {1000 * max(times(k)):.3g} ms a stage"
    notes = {
        "k": k, "pipeline_time": max(times(k)), "cpu_time": cpu_time, "gpu_time": gpu_time, "summary": summary,
    }  # fmt: skip
    return Placement(parts=tuple(parts), notes=notes)


def _first(problem: Problem, name: str) -> Device:
    for device in problem.fleet.devices:
        if device.device_class == name:
            return device
    raise UsageError(f"static-split needs a {name}, and there is none")
