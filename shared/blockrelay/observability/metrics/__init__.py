"""All Prometheus metrics, one class for each service: gateway, scheduler, worker.

A service creates its class once at start; only its attributes change a metric. Names follow vLLM's where the meaning is
the same, under the prefix `blockrelay_`; units are in the names. Counters and histograms begin at 0 when the process
starts, unless Redis keeps them (`totals`).

The name says what a series describes, and so how to aggregate it:

- `blockrelay_worker_` and `blockrelay_gateway_`: one process; add up.
- other counters and histograms: the same meaning from every process; add up.
- other gauges, and the counters of `totals`: the whole cell, with the same value from every process; take the maximum.

Gateway and worker both count tokens and prompts: the gateway what clients asked for and got, the worker what it
computed, re-runs included. The labels `cell` and `model` are on every series (`observability.registry`). A counter's
labels come from closed lists, and all its series exist from the start, so that a rate sees the first event.
"""
