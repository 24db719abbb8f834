"""Every Prometheus instrument, one group for each service: `gateway`, `scheduler`, `worker`.

A service builds its one group at start; the group's attribute is the only handle on an instrument. Names follow vLLM's
where the meaning is the same, under the prefix `blockrelay_`; units are in the names.

The name tells whose it is. `blockrelay_worker_` and `blockrelay_gateway_` are of one process. A counter or histogram
without a service in its name means the same wherever it comes from, so that sums over all processes are right. A gauge
without one, and the books (`totals`), speak of the whole cell: every process that tells them tells the same, so the
maximum is right. Where gateway and worker count the same
thing (tokens, prompts), the gateway counts what clients asked for and got, the worker what it computed, re-runs
included.

The labels `cell` and `model` are on every series (`observability.registry`); those of a counter come from closed lists,
and each of its series is there from the start, so that a rate sees the first event.
"""
