"""The numbers of policy of the worker: shares, times and limits, each with its unit and its reason.

Numbers that operators set are in `blockrelay.settings.WorkerSettings`. The ones that are asked for most:

- The KV pool of a CPU worker takes `kv_bytes`; without it `KV_SHARE_OF_ONE_WORKER` of the available memory, and no more
  than `max_requests` at full context use. `blockrelay up` sets `kv_bytes` (the launcher's policy has its share). On a
  GPU the pool takes what the weights leave of the budget: `gpu_memory`, else `DEVICE_USED_SHARE` of the free memory.
  `lifecycle/service.py StageService._pages` computes it.
- A hung step on a CPU is ended by the worker's own heartbeat thread (`lifecycle/heartbeat.py`), which ends the process;
  `up` or Kubernetes starts it again. The limit is `session_timeout_s` (default 30 s), or `STUCK_FACTOR` times what the
  step should take if that is longer. On a GPU the device's process ends at this limit, and the worker at
  `DEVICE_PATIENCE` times it.
"""

# Memory

#: Share of the available memory that a CPU worker without `kv_bytes` takes for KV pages. It does not know how many
#: workers share the machine: four of them leave room for weights and the system.
KV_SHARE_OF_ONE_WORKER = 0.2
#: Default budget on a device: this share of the free memory, less these bytes. The rest is for other programs and for
#: what a step needs beside weights and pages.
DEVICE_USED_SHARE = 0.9
DEVICE_LEFT_BYTES = 300 * 10**6
#: Default number of warm sessions of a sequential worker on a GPU and on a CPU; fewer where memory is short.
WARM_ON_GPU = 5
WARM_ON_CPU = 3
#: Dropped sessions of ONNX blocks between two clean-ups of memory: one takes milliseconds, and a session is large.
SESSIONS_A_CLEAN_UP = 5
#: Bytes by which a process may be larger after a clean-up than after the first one: lost memory, and a session or two.
#: Beyond that the device is due for a new process.
MAX_GROWTH_BYTES = 512 << 20
#: Share of the memory left that ONNX Runtime's weights may take on a CPU, and copies of them: its packing, and the copy
#: that it keeps beside it. KV pages need the rest.
SECOND_BACKEND_SHARE = 0.25
SECOND_BACKEND_COPIES = 2
#: ONNX Runtime is used where it needs less than this share of our time: its calls cannot be recorded.
WORTHWHILE_SHARE = 0.95
#: Recorded steps that are kept, since each holds memory of the device; the least recently used one is dropped for a new
#: one.
MAX_GRAPHS = 24
#: Bytes of pages that the standard operators of `plain` may copy in a step: a recorded step keeps its memory.
MAX_COPIED_BYTES = 32 << 20
#: Bytes of all files of the cache of graphs together: a graph of 32 layers has 0.2 MB.
GRAPH_CACHE_BYTES = 256 << 20
#: Bytes that drivers may use for their own caches of shaders: those of a large model fit, and no disk fills.
SHADER_CACHE_BYTES = 512 << 20
#: Share of the free memory that weights and KV pages of the blocks that `profile` measures may take.
PROFILE_MEMORY_SHARE = 0.5

# Batches

#: Most tokens of a batch, and most requests, on a CPU: as many as tests cover. Buffers grow with them.
CPU_MAX_ROWS = 1 << 14
#: Most tokens of a batch, and most requests, where ranks share a stage: their buffers cannot grow.
RANK_MAX_ROWS = 1 << 12
#: Most tokens of a batch, and most requests, with ONNX Runtime: as many as tests cover.
ONNX_MAX_ROWS = 1 << 12
#: Most rows of a batch whose logits score tokens of prompts: those of a vocabulary of 128,000 take 125 MiB.
SCORED_ROWS = 1 << 8

# Devices

#: Factor of the step limit of a worker with a device. The device's process ends at the limit itself; the worker, which
#: then repeats the step in parts, gets this many times as long.
DEVICE_PATIENCE = 3
#: Seconds that a device, or the ranks of a CPU, may take to load a stage: cold shaders take most of a minute each.
LOAD_LIMIT_S = 600.0
#: Longest time in seconds that other devices of the model wait while one gets a new process: the load, and a minute.
RENEWAL_S = int(LOAD_LIMIT_S) + 60
#: Seconds for recording steps when a stage is loaded; the buckets that are left are recorded when they come.
RECORDING_S = 180.0
#: Seconds to wait after the first, second and third loss of a device within OF_LATE_S: most losses pass at once.
BACKOFF_S = (1.0, 5.0, 30.0)
#: MAX_LOSSES losses within OF_LATE_S seconds put a device in quarantine: it is tried once in QUARANTINE_S seconds,
#: because every loss repeats the steps of its requests.
MAX_LOSSES = 3
OF_LATE_S = 600.0
QUARANTINE_S = 3600.0
#: Seconds between two renewals of a process that was not lost: if one did not help, the next will not either.
RENEWALS_APART_S = 3600.0
#: Seconds between two tries to open a device that is here and cannot be used: another program may leave it.
OPENED_AGAIN_S = (*BACKOFF_S, 60.0)
#: Seconds between two requests for leave to renew a device: one device of the model is renewed at a time.
RENEWAL_ASK_S = 10.0
#: A device whose median step takes this many times as long as at first is slow, and due for a new process.
SLOW_FACTOR = 1.5
#: Seconds that a worker with a stage waits for the others to get theirs: a plan names all workers that registered
#: within a second.
STAGES_S = 10.0
#: Seconds between two looks at the process of a device and the deadline of its answer, and seconds that it has to end
#: once its pipe is closed: it is killed then.
DEVICE_POLL_S = 0.05
DEVICE_END_S = 2.0
#: Longest time in seconds to list the devices of this host, since a broken driver may never answer, and seconds between
#: two checks whether the list is done.
LIST_DEVICES_S = 60.0
LIST_POLL_S = 0.05
#: Seconds that nvidia-smi may take: with a broken driver it may never answer.
NVIDIA_SMI_S = 10.0
#: Limit of a step on a device in `profile`, in seconds: many rows at the longest context of a large model take long.
PROFILE_STEP_S = 300.0
#: Limit of one trial of `gpu-report`, in seconds: compiling a shader for the first time can take most of a minute.
GPU_REPORT_TRIAL_S = 600.0

# Registration and the end

#: Seconds between two looks at the plan of a worker that waits for a stage.
PLAN_POLL_S = 0.1
#: Seconds for which memory has to lack before a worker says so: a process that ends gives its memory back soon.
SHORT_PATIENCE_S = 2.0
#: Seconds after which a worker tries a block folder again with which memory ran out, if it was given no smaller one.
SHORT_FOR_S = 60.0
#: Seconds within which steps that run out of memory twice have a worker leave its stage for a smaller precision.
OUT_OF_MEMORY_TWICE_S = 600.0
#: Seconds between two reports of free memory: it is read from the system, and decides about minutes.
FREE_MEMORY_S = 5.0
#: Seconds between two tries to enter a cell that has no room.
REGISTER_RETRY_S = 1.0
#: Seconds until the payload inbox of a worker expires that renews it no more: the worker has died.
INBOX_TTL_S = 60
#: Tokens of the requests that a worker which moves on has queued again and that no other has gone on with: their KV
#: takes a large model half a second, and the next ones serve on meanwhile.
HAND_OVER_ROWS = 256
#: Seconds between two looks at these requests.
HAND_OVER_LOOK_S = 0.01
#: Seconds between two checks whether the worker should try its device or end.
DEVICE_WAIT_POLL_S = 1.0
#: Seconds that a worker waits at its end for KV pages to be written to the page store: they save others work, but
#: nothing depends on them.
PAGES_FLUSH_S = 2.0

# Between workers

#: Unread messages from which on an inbox counts as full: prompt chunks for it wait, decode tokens still go.
FULL_INBOX_MESSAGES = 8
#: Seconds that computed rows wait for room in a full payload Redis or ring; then their requests run again.
ROWS_WAIT_S = 2.0
#: Seconds that a worker of the same host may take to let another in; then their rows go through Redis.
CONNECT_S = 1.0
#: Seconds that a new connection may take to send its Hello: a worker sends it at once.
HELLO_S = 2.0
#: Most connections without a Hello; more are closed at once, since other programs may connect too.
MAX_STRANGERS = 16
#: Seconds that a process may take to end after its connection closed: then its rows are known to be lost.
ENDING_S = 0.2
#: Most bytes in a ring; a larger one is refused, because the sender names its size.
MAX_RING_BYTES = 1 << 32
#: KV fields in one transaction: a few megabytes, so that other commands wait for milliseconds.
PAGES_TOGETHER = 64

# What is reported

#: Seconds for which `transport.stage_spans` collects spans before it writes them together: fewer commands.
GATHER_S = 0.05
#: Most spans that wait to be written; no step waits for them.
SPANS_KEPT = 4096
#: Seconds without spans after the payload Redis failed, or used more than this share of its memory: rows and results
#: need the rest.
SPANS_PAUSE_S = 5.0
SPANS_FULL_SHARE = 0.5
#: Seconds between comparisons of the control Redis' clock with this host's, and tries of each; the quickest counts.
CLOCK_COMPARE_S = 30.0
CLOCK_TRIES = 3
#: Seconds between two looks whether there is a subscriber to status events, and between two messages while there is.
SUBSCRIBER_POLL_S = 0.5
STATUS_PUBLISH_S = 0.02
#: Seconds without status events after Redis failed.
STATUS_PAUSE_S = 5.0
#: Most events that wait, and most in one message; the oldest are dropped, since no step waits for a subscriber.
STATUS_EVENTS_KEPT = 4096
STATUS_EVENTS_A_MESSAGE = 256
#: Least seconds between two answers of a device's process that say how much memory is in use: each asks
#: the driver, and memory grows slowly.
MEMORY_EVERY_S = 1.0

# Steps

#: A step is stuck after this many times its expected duration (and not before `session_timeout_s`): measured times
#: vary, and a hung step never ends.
STUCK_FACTOR = 4
#: Share of the step limit that a chunk of prompts should take: tokens far into a long prompt cost several times as much
#: as those that were measured.
CHUNK_SHARE = 1 / 6
#: Seconds that the loop waits for an event when there is nothing to compute: events wake it, so that this is only a
#: bound.
IDLE_WAIT_S = 0.2
#: Seconds that the loop waits for an event while rows wait for pages or for room in the next inbox: no event announces
#: either.
HELD_WAIT_S = 0.005
#: Seconds until a run is checked again whose deadline has passed by this host's clock, but not by that of Redis.
EARLY_S = 1.0
#: Seconds that a step waits for the commits of a request in quarantine: its process may die in this step.
QUARANTINE_COMMIT_S = 2.0
#: Seconds that a private run that leaves waits for its tokens to be in the log, then for its pages in the store.
EXPORT_S = 2.0
#: Seconds between two looks at the log, for tokens that are not in it yet.
LOG_POLL_S = 0.002

# The page store

#: Most pages that wait to be written; more are dropped, because a page of the store only saves work.
PAGES_QUEUED = 4096
#: Bytes of one call of a tier, about: its time limits how late a load notices that it takes too long.
STORE_CALL_BYTES = 4 << 20
#: Seconds after which a load stops before its next call of a tier; pages filled by then are used, and computing the
#: rest is as fast.
STORE_LOAD_S = 2.0
#: Seconds for which the payload Redis is not used as a store after a failure.
STORE_PAUSE_S = 5.0
#: Seconds for which pages of a preempted run are held in the tiers: an older request may run that long.
HOLD_S = 600.0
#: Seconds after which a file under its temporary name is removed: its writer has died.
ABANDONED_FILE_S = 60.0
