"""Reads from a worker's metrics how it has spent its time since it started."""

from collections.abc import Mapping
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from blockrelay_launcher.policy import WORKER_ANSWER_S

#: The metric of each total.
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
#: The metric, and the value of its label `result`, of each count of warm sessions (workers of ONNX blocks).
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
    """Returns the totals of a worker (an entry of `read_status`); None if it answers no metrics in WORKER_ANSWER_S."""
    try:
        answer = httpx.get(
            f"http://{worker['host']}:{worker['port']}/metrics", timeout=WORKER_ANSWER_S, trust_env=False
        )
        return parse_totals(answer.text)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None


def parse_totals(text: str) -> dict[str, Any]:
    """Returns the totals in the Prometheus text of a worker's metrics; 0 for a metric that is absent.

    The entry `sessions` is present if the worker has made warm sessions. Raises ValueError for other text.
    """
    samples = {
        (sample.name, sample.labels.get("result", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    totals: dict[str, Any] = {name: samples.get((metric, ""), 0.0) for name, metric in TOTALS.items()}
    sessions = {name: samples.get(metric, 0.0) for name, metric in SESSIONS.items()}
    return totals | ({"sessions": sessions} if sessions["made"] else {})
