"""The dashboard of GPUs: losses, blocks that moved to CPUs, step times, memory, sensors."""

from deploy.dashboards.panel import Dashboard, Panel, Query, increase, of_cell, of_processes, rate

_STAGE, _GPU = "blockrelay_worker_stage_latency_seconds", 'device="gpu"'
_STEP_TIME = f"{rate(f'{_STAGE}_sum', 'stage', where=_GPU)} / {rate(f'{_STAGE}_count', 'stage', where=_GPU)}"


def _sensor(what: str) -> Query:
    """The query for a sensor of each GPU, which all workers of its machine export with the same value."""
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
                    meaning="By reason. The GPU's requests go on on CPUs, and a new process is started for it.",
                    queries=[Query(increase("blockrelay_worker_device_losses_total", "reason"), "{{reason}}")],
                    cause="device",
                ),
                Panel(
                    title="Blocks that went to CPUs",
                    meaning="During a request, by block. If it is one block alone, it has no room or the driver fails.",
                    queries=[Query(increase("blockrelay_worker_fallbacks_total", "block"), "{{block}}")],
                    cause="device",
                ),
                Panel(
                    title="In quarantine",
                    meaning="GPUs that were lost three times in ten minutes. They are tried again after an hour.",
                    queries=[Query(of_processes("blockrelay_worker_device_quarantined"))],
                    cause="device",
                    kind="number",
                ),
                Panel(
                    title="New processes",
                    meaning="lost: after a loss. slow: steps took half as long again, even after a clean-up.",
                    queries=[Query(increase("blockrelay_worker_device_renewals_total", "reason"), "{{reason}}")],
                    cause="device",
                ),
                Panel(
                    title="Canaries",
                    meaning="Known answers that GPUs computed again. A GPU with a wrong one counts as lost.",
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
                    meaning="Of stages on GPUs. It should grow only with the tokens of a batch and their context.",
                    queries=[Query(_STEP_TIME, "stage {{stage}}")],
                    cause="device",
                    unit="s",
                ),
                Panel(
                    title="Over the bus",
                    meaning="Bytes per second to and from GPUs: hidden states, logits, KV pages; without weights.",
                    queries=[Query(rate("blockrelay_worker_device_bus_bytes_total", "direction"), "{{direction}}")],
                    cause="device",
                    unit="Bps",
                ),
                Panel(
                    title="Memory of GPU workers",
                    meaning="Weights and KV pages on GPUs, and the main memory of their processes.",
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
                    meaning="By all programs, where the provider reports it (WebGPU and DirectML do not).",
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
                    meaning="Share of the time in which a GPU computed, for any program, if its driver reports it.",
                    queries=[_sensor("utilisation_ratio")],
                    cause="device",
                    unit="percentunit",
                ),
                Panel(
                    title="Temperature",
                    meaning="If the driver reports it. A GPU that is too hot computes more slowly.",
                    queries=[_sensor("temperature_celsius")],
                    cause="device",
                    unit="celsius",
                ),
                Panel(
                    title="Power",
                    meaning="If the driver reports it.",
                    queries=[_sensor("power_watts")],
                    cause="device",
                    unit="watt",
                ),
            ),
        ),
    ),
)
