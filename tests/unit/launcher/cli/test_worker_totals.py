"""Totals out of a worker's metrics."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay_launcher.cli.worker_totals import SESSIONS, TOTALS, parse_totals, read_totals


def test_every_total_is_a_metric_of_workers() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    metrics.inference_seconds.inc(1.5)
    metrics.inferences.inc(3)
    text = generate_latest(registry).decode()
    for metric in TOTALS.values():
        assert f"\n{metric} " in text, metric
    assert parse_totals(text) == {**dict.fromkeys(TOTALS, 0.0), "inference_s": 1.5, "inferences": 3.0}


def test_sessions_of_onnx_blocks_are_told_where_there_are_some() -> None:
    registry = CollectorRegistry()
    counters = WorkerMetrics(registry).device.counters
    for number, name in enumerate(("made", "evicted", "clean_ups", "load_seconds", "run_seconds", "jobs_ok"), 1):
        counters[name].inc(number)
    counters["jobs_failed"].inc(7)
    told = parse_totals(generate_latest(registry).decode())["sessions"]
    assert list(told) == list(SESSIONS) and list(told.values()) == [1, 2, 3, 4, 5, 6, 7]


def test_who_does_not_answer_has_none() -> None:
    assert read_totals({"host": "127.0.0.1", "port": 1}) is None
    assert read_totals({"host": "no such host", "port": "?"}) is None


def test_what_is_no_prometheus_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        parse_totals("nonsense {")
