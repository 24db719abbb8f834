"""What a worker has spent its time on since it began, read from its metrics."""

from collections.abc import Mapping
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

#: How long a worker may take to answer. Seconds.
PATIENCE_S = 1.0
#: What is shown -> the metric.
TOTALS: Mapping[str, str] = {
    "inferences": "blockrelay_worker_inferences_total",
    "inference_s": "blockrelay_worker_inference_seconds_total",
    "token_generation_s": "blockrelay_worker_token_generation_seconds_total",
    "state_transfer_s": "blockrelay_worker_state_transfer_seconds_total",
    "cache_management_s": "blockrelay_worker_cache_management_seconds_total",
    "total_s": "blockrelay_worker_stage_busy_seconds_total",
    "prompt_tokens": "blockrelay_worker_prompt_tokens_total",
    "tokens": "blockrelay_worker_generation_tokens_total",
}
#: Those of them that are seconds, the total last.
SECONDS = tuple(name for name in TOTALS if name.endswith("_s"))
#: Of a worker of ONNX blocks as they are: what is shown of its sessions -> the metric, and the label of it.
SESSIONS: Mapping[str, tuple[str, str]] = {
    "made": ("blockrelay_worker_warm_sessions_made_total", ""),
    "evicted": ("blockrelay_worker_warm_sessions_evicted_total", ""),
    "clean_ups": ("blockrelay_worker_warm_session_cleanups_total", ""),
    "load_s": ("blockrelay_worker_warm_session_load_seconds_total", ""),
    "run_s": ("blockrelay_worker_warm_session_run_seconds_total", ""),
    "jobs_ok": ("blockrelay_worker_warm_session_jobs_total", "ok"),
    "jobs_failed": ("blockrelay_worker_warm_session_jobs_total", "failed"),
}


def read_totals(worker: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a worker of `status`; None for one that cannot be reached from here."""
    try:
        answer = httpx.get(f"http://{worker['host']}:{worker['port']}/metrics", timeout=PATIENCE_S, trust_env=False)
        return parse_totals(answer.text)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None


def parse_totals(text: str) -> dict[str, Any]:
    """Of a worker's metrics; 0 for what they do not say. `sessions` are there if it has made some. ValueError for what
    is no Prometheus text."""
    samples = {
        (sample.name, sample.labels.get("result", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    totals: dict[str, Any] = {name: samples.get((metric, ""), 0.0) for name, metric in TOTALS.items()}
    sessions = {name: samples.get(metric, 0.0) for name, metric in SESSIONS.items()}
    return totals | ({"sessions": sessions} if sessions["made"] else {})
