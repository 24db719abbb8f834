"""Numbers of the protocol that Python and Lua share: `LUA` is what every script begins with."""

#: Tokens of a KV page. The kernels' number too: it decides bits (`blockrelay_worker.kernels.specification`).
PAGE_TOKENS = 16
#: Workers of a cell; one more waits outside. What reads the registry reads all of it, so this bounds scripts too.
MAX_WORKERS = 1024
#: Of a cell for which no scheduler has published others: how long a finished request can still be read, and the silence
#: that makes a worker dead.
RETENTION_S, DEAD_AFTER_MS = 900, 3000
#: How long a tensor result may be there once it is stored, and once it has been read.
RESULT_S, READ_RESULT_S = 60, 5
#: How long KV that a client gave with a request waits for a worker; one that comes later computes it. Seconds.
GIVEN_S = 600
#: Steps of stages that are kept of a request that asked for a trace, and for how long after the last one.
TRACE_STEPS, TRACE_S = 4096, 900
#: Deaths of its workers at one log length from which on a request is tried alone, and deaths while it was that end it.
QUARANTINE_AFTER, MAX_QUARANTINE_DEATHS = 3, 5
#: How long a worker may try a request alone before its note of it is stale.
QUARANTINE_S = 600

LUA = {
    "PAGE_TOKENS": PAGE_TOKENS,
    "MAX_WORKERS": MAX_WORKERS,
    "RETENTION_S": RETENTION_S,
    "DEAD_AFTER_MS": DEAD_AFTER_MS,
    "RESULT_MS": 1000 * RESULT_S,
    "QUARANTINE_AFTER": QUARANTINE_AFTER,
    "MAX_QUARANTINE_DEATHS": MAX_QUARANTINE_DEATHS,
    "QUARANTINE_S": QUARANTINE_S,
}
