"""Is a GPU well? How busy and hot it is, how often it was lost, what went to CPUs for it, what it holds."""

from deploy.dashboards.panel import Dashboard, Panel, Query, increase, of_cell, of_processes, rate

_STAGE, _GPU = "blockrelay_worker_stage_latency_seconds", 'device="gpu"'
_STEP_TIME = f"{rate(f'{_STAGE}_sum', 'stage', where=_GPU)} / {rate(f'{_STAGE}_count', 'stage', where=_GPU)}"


def _sensor(what: str) -> Query:
    """Workers of one machine tell the same."""
    return Query(of_cell(f"blockrelay_worker_gpu_{what}", "instance, gpu"), "{{instance}} {{gpu}}")


DEVICES = Dashboard(
    name="devices",
    title="Blockrelay / GPUs",
    rows=(
        (
            "What fails",
            (
                Panel(
                    title="GPUs that were lost",
                    meaning="By reason. The requests that were there go on at CPUs, and a new process is begun.",
                    queries=[Query(increase("blockrelay_worker_device_losses_total", "reason"), "{{reason}}")],
                    cause="device",
                ),
                Panel(
                    title="Blocks that went to CPUs",
                    meaning="In mid-request, by block. One block alone: it has no room, or the driver refuses it.",
                    queries=[Query(increase("blockrelay_worker_fallbacks_total", "block"), "{{block}}")],
                    cause="device",
                ),
                Panel(
                    title="In quarantine",
                    meaning="GPUs that were lost three times in ten minutes: tried again an hour later.",
                    queries=[Query(of_processes("blockrelay_worker_device_quarantined"))],
                    cause="device",
                    kind="number",
                ),
                Panel(
                    title="New processes",
                    meaning="lost: behind a loss. slow: steps took half as long again, behind a clean-up too.",
                    queries=[Query(increase("blockrelay_worker_device_renewals_total", "reason"), "{{reason}}")],
                    cause="device",
                ),
                Panel(
                    title="Canaries",
                    meaning="Known answers that GPUs were asked for. A wrong one loses the GPU.",
                    queries=[Query(increase("blockrelay_worker_canaries_total", "result"), "{{result}}")],
                    cause="device",
                ),
            ),
        ),
        (
            "How it computes",
            (
                Panel(
                    title="Step time of a stage, mean",
                    meaning="Of stages on GPUs. It grows with rows and context; at equal ones it should not.",
                    queries=[Query(_STEP_TIME, "stage {{stage}}")],
                    cause="device",
                    unit="s",
                ),
                Panel(
                    title="Over the bus",
                    meaning="Bytes per second to GPUs and from them: rows, logits, KV pages that move; no weights.",
                    queries=[Query(rate("blockrelay_worker_device_bus_bytes_total", "direction"), "{{direction}}")],
                    cause="device",
                    unit="Bps",
                ),
                Panel(
                    title="What is held",
                    meaning="Weights and KV pages on GPUs, and this machine's memory that their processes have.",
                    queries=[
                        Query(of_processes("blockrelay_worker_device_weight_bytes"), "weights"),
                        Query(of_processes("blockrelay_worker_device_pool_bytes"), "KV pages"),
                        Query(of_processes("blockrelay_worker_device_process_bytes"), "processes"),
                    ],
                    cause="device",
                    unit="bytes",
                ),
                Panel(
                    title="Memory of GPUs in use",
                    meaning="By whomever, where the provider tells (WebGPU and DirectML do not).",
                    queries=[Query(of_processes("blockrelay_worker_device_memory_used_bytes"))],
                    cause="device",
                    unit="bytes",
                ),
            ),
        ),
        (
            "Sensors",
            (
                Panel(
                    title="Utilisation",
                    meaning="Share of the time in which a GPU computed, for whomever, where its driver tells.",
                    queries=[_sensor("utilisation_ratio")],
                    cause="device",
                    unit="percentunit",
                ),
                Panel(
                    title="Temperature",
                    meaning="Where its driver tells. A GPU that is too hot computes more slowly.",
                    queries=[_sensor("temperature_celsius")],
                    cause="device",
                    unit="celsius",
                ),
                Panel(
                    title="Power",
                    meaning="Where its driver tells.",
                    queries=[_sensor("power_watts")],
                    cause="device",
                    unit="watt",
                ),
            ),
        ),
    ),
)
