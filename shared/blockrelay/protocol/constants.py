"""Numbers of the protocol that several services share, some of them with the Lua scripts."""

#: Tokens of a KV page. The kernels' number too: it decides bits (`blockrelay_worker.kernels.specification`).
PAGE_TOKENS = 16
#: Draft tokens that a run has in a step at most. A run of several stages reserves KV pages for as many behind its known
#: tokens.
MAX_DRAFTS = 8
#: Most workers of a cell; a further one waits for a place. Scripts read the whole registry, so this bounds their time.
MAX_WORKERS = 1024
#: Defaults for a cell without published settings: seconds that a finished request can be read, and milliseconds
#: without a heartbeat after which a worker is dead.
RETENTION_S, DEAD_AFTER_MS = 900, 3000
#: Seconds that a tensor result is kept after it was stored, and after it was read.
RESULT_S, READ_RESULT_S = 60, 5
#: Seconds that KV from a client is kept for the worker; a worker that claims the request later computes it instead.
GIVEN_S = 600
#: Stage steps kept for a request that asked for a trace, and seconds that they are kept after the last one.
TRACE_STEPS, TRACE_S = 4096, 900
#: Worker deaths at one log length after which a request runs alone, and deaths while it ran alone that end it.
QUARANTINE_AFTER, MAX_QUARANTINE_DEATHS = 3, 5
#: Share of the control Redis' maxmemory above which gateways forget ended requests early, `status` reports its use, and
#: which `analyse --sizing` plans for.
YIELD_SHARE = 0.50
#: Seconds after which the mark that a worker runs a request alone expires.
QUARANTINE_S = 600

#: Constants that every script begins with, by their names in Lua.
LUA = {
    "PAGE_TOKENS": PAGE_TOKENS,
    "MAX_DRAFTS": MAX_DRAFTS,
    "MAX_WORKERS": MAX_WORKERS,
    "RETENTION_S": RETENTION_S,
    "DEAD_AFTER_MS": DEAD_AFTER_MS,
    "RESULT_MS": 1000 * RESULT_S,
    "QUARANTINE_AFTER": QUARANTINE_AFTER,
    "MAX_QUARANTINE_DEATHS": MAX_QUARANTINE_DEATHS,
    "QUARANTINE_S": QUARANTINE_S,
}
