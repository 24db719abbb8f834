"""The numbers of policy of the scheduler: times, factors and limits, each with its unit and its reason.

Numbers that operators set are in `blockrelay.settings.SchedulerSettings`. The ones that are asked for most:

- A worker counts as dead without heartbeats for `dead_after_s` (default 3 s); `liveness.py` declares it.
- An empty stage takes a worker of the stage that has the most, at least two, when it has been empty for `vacancy_s`
  (default 15 s): a replacement usually comes sooner, and then nothing has to load twice. `plan_publisher.py` counts
  the time, and `planning/assignment.py` chooses the worker.
- A running request without progress is run again after `stalled_after_s` (default 30 s), for long prompts later; see
  `PROMPT_PATIENCE`. `recovery.py` decides.
"""

# How often it looks

#: Seconds between two looks at the unfinished requests and at what metrics tell. Deaths of workers are looked for each
#: `tick_s` instead, because requests wait for them.
LOOK_S = 1.0
#: About how many requests one look takes, so that it lasts milliseconds; the next one continues after them.
LOOK_LIMIT = 1024
#: Seconds between two looks at the services that keep the protocol number from being raised: all keys are walked over,
#: and a rolling upgrade takes minutes.
RAISE_EVERY_S = 5.0
#: Seconds between two plans that only say which GPUs are ready: one that comes and goes does not publish many.
READY_EVERY_S = 1.0

#: Seconds between two comparisons of measured times with the plan: heartbeats bring new ones twice a second, and a
#: better plan has to stay better for minutes.
REPLAN_LOOK_S = 3.0
#: Share of the gain that a better plan needs with which it still counts as better: single measurements are noisy.
REPLAN_KEPT = 2 / 3

#: Share by which a predicted slowdown of CPUs must change to be published again: below that it is noise, and a client's
#: limit is no finer.
SLOWDOWN_CHANGE = 0.1

# Precisions and memory

#: Seconds between two looks whether memory asks for another precision: heartbeats tell free memory less often.
MEMORY_LOOK_S = 1.0
#: Seconds for which a stage has to be without a worker, for want of memory, before the precision changes: another one
#: of its workers may be starting again.
DEGRADE_AFTER_S = 5.0
#: A cell goes back to a larger precision when memory has room for this many times what it needs: free memory goes up
#: and down, and each change makes requests wait.
RESTORE_MARGIN = 1.1
#: Longest wait before a cell goes back to the larger precision, which doubles each time that it did not last.
RESTORE_WAIT_MAX_S = 3600.0

# Recovery and scaling

#: Estimates of the time of a prompt are rough: only a request that takes this many times as long is stuck.
PROMPT_PATIENCE = 4
#: How many times the work must fit into the workers that are left before a route is given up, so that a cell does not
#: shrink and grow in turns.
SCALE_DOWN_SLACK = 1.25
#: Seconds that the thread that deletes inboxes has to end with the scheduler: it is in one call of Redis at most.
SWEEPER_END_S = 1.0

# `blockrelay plan`

#: Tokens of context and requests at once that a plan has room for, where no option says otherwise: a chat, and a small
#: team.
DEFAULT_CONTEXT = 2048
DEFAULT_REQUESTS = 16
#: Assumed speed of a CPU without a profile.
GUESSED_BYTES_PER_SECOND, GUESSED_OPERATIONS_PER_SECOND = 2e10, 2e11
#: Share of this machine's memory that a plan may use: the rest is the system's and the gateway's.
MACHINE_MEMORY_SHARE = 0.8
#: Seconds within which a scheduler has taken a plan that was applied, and between two looks at whether it has. A
#: scheduler that starts at that moment needs some.
APPLY_S = 15.0
APPLY_POLL_S = 0.1
#: Seconds that the strategy `auto` may take until a plan is proved best; longer than a user waits for a start.
PROOF_LIMIT_S = 30.0
#: Combinations of used devices up to which trying all of them is quick.
MAX_COMBINATIONS = 1000
