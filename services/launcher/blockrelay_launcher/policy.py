"""The numbers of policy of the launcher: shares, times and limits, each with its unit and its reason.

Numbers that operators set are options of `blockrelay up` and settings. The KV pools: the workers of one `up` share
`KV_SHARE_OF_ALL_WORKERS` of the free memory, evenly by stage, unless BLOCKRELAY_KV_BYTES is set. GPU workers count too,
but use their part only if the memory of the GPU is unknown. A worker that is started alone takes
`KV_SHARE_OF_ONE_WORKER` (the worker's policy).
"""

# Memory and disk

#: Share of the memory that is free at the start which all workers of one `up` together may fill with KV pages. Weights,
#: Redis and gateways on the same machine need the rest.
KV_SHARE_OF_ALL_WORKERS = 0.4
#: Share of the free memory, and of the free room in /dev/shm, that shared KV pages may fill. They are a cache: the
#: pools come first, and other programs use /dev/shm too.
PAGE_STORE_MEMORY_SHARE = 1 / 8
PAGE_STORE_ROOM_SHARE = 1 / 2
#: Memory limit of the embedded control Redis in bytes. A request takes kilobytes. Above 70 % gateways accept no new
#: requests, so that commits always fit.
CONTROL_REDIS_BYTES = 1 << 30
#: Bytes from which the log of a service is rotated. It replaces the one that was rotated before, so that a service has
#: at most twice this on disk.
LOG_BYTES = 16 << 20
#: Share of the free memory up to which `profile` measures ONNX blocks in a whole system, whose workers have them all in
#: memory at once.
PROFILE_MEMORY_SHARE = 0.5

# Restarts of services

#: Seconds before a restart: the first delay, doubled for each quick death up to the longest. A child that has run for
#: LONG_LIFE_S gets the first delay again: its death has another cause. One that refuses to serve waits the longest.
FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 5.0
LONG_LIFE_S = 2.0
#: Seconds after which a running service that had refused to serve counts as serving: it has loaded by then, or has
#: refused again.
REFUSAL_STANDS_S = 60.0
#: Deaths of a child (no GPU worker) before the system is ready that end `up`: it is broken, and more restarts do not
#: help.
MAX_EARLY_DEATHS = 3

# The start of a system

#: Seconds between checks of `/readyz`, between reads of the logs, and between lines about not being ready: a user who
#: waits wants the first line at once and a reason now and then.
LOOK_READY_S = 0.1
LOOK_LOGS_S = 0.5
SAY_WHY_S = 10.0
#: Seconds to wait for a Redis whose launcher was killed: its files are locked until it has ended, and it may have to
#: write much.
ABANDONED_REDIS_S = 10.0
#: Seconds for which a page folder without an owner file is left alone: its `up` may still be about to write one.
OWNERLESS_FOLDER_S = 60.0
#: Seconds for which Redis is tried at the start, to forget the workers of the run before. It has answered already, so
#: that a longer silence ends `up`.
FORGET_WORKERS_S = 5.0
#: Seconds that an empty Redis may take to start: it takes less than one on a slow machine.
REDIS_START_S = 10.0
#: Seconds that the probe of all devices may take: the first one may compile shaders, most of a minute each.
DEVICE_PROBE_S = 300.0

# The end of a system

#: Seconds that each group may take to end before it is killed. Workers may drain first (BLOCKRELAY_DRAIN_S); Redis may
#: write its files.
WORKERS_END_S = 7.0
GATEWAYS_END_S = 7.0
SCHEDULERS_END_S = 5.0
REDIS_END_S = 15.0
#: Seconds for the reports of the workers' ends: without them another `up` waits until their heartbeats are too old.
DEATH_REPORTS_S = 3.0
#: Seconds that the thread of the reports may take to end a report in progress.
DEATH_REPORT_CLOSE_S = 1.0

# What `status` and `cells` report

#: Seconds without progress from which a request is reported: a normal prompt or queue takes less.
STILL_S = 5.0
#: Seconds from which an answer of Redis counts as slow, since each commit waits for several, and the number of
#: measurements, whose median counts.
SLOW_REDIS_S = 0.005
REDIS_MEASUREMENTS = 9
#: Seconds that a worker may take to answer `status`: the others are shown without it.
WORKER_ANSWER_S = 1.0
#: Number of workers that `status` asks for their totals at a time, so that hundreds take seconds.
ASKED_AT_ONCE = 32
#: Seconds that a cell may take to answer `cells`: the others are shown without it.
CELL_ANSWER_S = 2.0
