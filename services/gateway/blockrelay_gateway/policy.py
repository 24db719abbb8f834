"""The numbers of policy of the gateway: shares, times and limits, each with its unit and its reason.

Numbers that operators set are in `blockrelay.settings.GatewaySettings`. The ones that are asked for most:

- Nothing new is accepted above `max_in_flight` requests (default 1024), above a wait of `max_wait_s` (default 300 s),
  and above the shares of Redis' memory below. `admission/limits.py` and the script ACCEPT decide.
- A request whose client went away is cancelled after `grace_s` (default 30 s).
- A gateway that ends serves its streams for `gateway_drain_s` (default 60 s) more; `draining/course.py` has the steps.
"""

# Memory of Redis

#: Share of the control Redis' maxmemory above which nothing new is accepted: COMMIT must always fit.
CONTROL_FULL_SHARE = 0.70
#: Ended requests that are forgotten early (above YIELD_SHARE of it) in each call, and most calls in one poll: small
#: calls let other commands through.
FORGOTTEN_A_CALL = 128
FORGET_CALLS_A_POLL = 64
#: Seconds between two looks at the memory of the control Redis: a second of requests does not fill what is above the
#: share.
MEMORY_POLL_S = 1.0
#: Seconds between two extra polls, which are made before a request is refused because memory is short: it may have room
#: again.
MEMORY_EXTRA_POLL_S = 0.1
#: Retry-After in milliseconds if Redis' memory is short: it comes back when requests end.
MEMORY_RETRY_MS = 5000
#: Share of the payload Redis' memory that results may take; the second if it is also the control Redis. As much again
#: may be on its way to readers; hidden states between stages, and KV pages, need the rest.
RESULTS_SHARE = 1 / 3
RESULTS_SHARE_OF_CONTROL = 1 / 8
#: Share of the results' memory that one tenant may take, so that others have room.
TENANT_RESULTS_SHARE = 1 / 2
#: Share of the machine's memory that counts as the limit of a Redis without `maxmemory`: other processes need the rest.
UNLIMITED_REDIS_SHARE = 1 / 2
#: Share of the payload Redis' memory above which nothing new is accepted: hidden states between stages must fit.
PAYLOAD_FULL_SHARE = 0.90
#: Seconds between two looks at the memory of the payload Redis: what is above the share is room for a second.
PAYLOAD_POLL_S = 1.0

# Memory of the gateway

#: Memory for bodies and answers without a setting: the available memory divided by the first number, at most the second
#: (bytes).
BODIES_DIVISOR = 4
MAX_BODIES_BYTES = 320 << 20
#: The most bytes of a small body, which never waits for large ones.
SMALL_BODY_BYTES = 64 << 10
#: Share of the budget that large bodies that wait may take together, and with parsed JSON and answers: the rest is for
#: small bodies alone. The parsed JSON of one tenant's body may take half of that, so that the bodies of other tenants
#: find room meanwhile.
WAITING_SHARE = 1 / 2
LARGE_SHARE = 7 / 8
#: The most bytes of a request line with its headers, as in other servers.
HEAD_BYTES = 64 << 10
#: The most bytes of float32 logits that one step may ask for with `logits: all`: they are in memory at once.
MAX_RESULT_BYTES = 256 << 20
#: The most bytes of KV in one answer: they are in memory at once.
MAX_KV_BYTES = 256 << 20
#: KV pages in one command of Redis: a few megabytes, so that other commands wait for milliseconds.
KV_FIELDS_A_COMMAND = 64
#: Bytes of a result in one command, a multiple of a value's size, and the number of results that are read at once. Both
#: are small because a part is copied several times on its way, and no budget counts the copies.
RESULT_PART_BYTES = 1 << 20
RESULTS_READ_AT_ONCE = 4
#: The most entries of one log in one read, which bounds the memory of a read.
LOG_ENTRIES_A_READ = 256
#: The most status events that wait for a listener; later ones are dropped, and the listener gets their number.
STATUS_EVENTS_KEPT = 2048
#: Requests whose tenants are remembered for status events, which bounds the memory for them.
TENANTS_REMEMBERED = 10_000

# Work beside the event loop

#: Bytes from which on the work costs more than the hop to a thread (about 0.1 ms).
OFFLOAD_BYTES = 16 << 10
#: Tries of a call whose helper dies: something other than the call may have ended the helper.
HELPER_TRIES = 2
#: Seconds that a call may take, with the wait for memory and for a helper, and the helper's start: then the client gets
#: an error instead of silence.
HELPER_CALL_S = 60.0
#: Bytes of a body, and of its parsed JSON, from which on a helper reads it: this process would stand still for 5 ms.
HELPER_BODY_BYTES = 256 << 10
HELPER_PARSED_BYTES = 2 << 20
#: Niceness of a helper process: helpers yield to the gateway where cores are short.
HELPER_NICENESS = 10

# Connections

#: Seconds that an idle connection is kept: longer than usual clients and proxies keep it, so that they close it and
#: never write into one that we are closing.
IDLE_CONNECTION_S = 75
#: Seconds that an idle connection is kept after the port is closed. It outlasts the pools of httpx and the `openai`
#: client (5 s), so that they drop it first: a request may be on its way on a connection that we close.
LAST_REQUEST_S = 6.0
#: Seconds that a WebSocket of a gateway that ends waits for the other side's word that it is closed: most answer at
#: once.
LAST_CLOSE_S = 1.0
#: Seconds for which connections that never stop coming keep a gateway that ends from closing its port.
LAST_ACCEPTS_S = 1.0
#: Bytes of a text message from which it is passed on as a ReceivedBody: to decode it takes 10 ms and more.
LARGE_MESSAGE_BYTES = 256 << 10
#: Seconds between two looks whether there is room for the rest of a message.
MESSAGE_ROOM_POLL_S = 0.05
#: The rest of a body that is too large is read up to this multiple of the limit, or until the client is silent for this
#: many seconds: closing at once would reset the connection before the client could read the answer.
DRAIN_FACTOR = 8
DRAIN_IDLE_S = 0.5
#: Seconds for which a browser keeps the answer to a preflight: fewer requests, and a changed list of origins counts
#: soon.
PREFLIGHT_S = 600
#: Messages of one socket that are answered at once; more wait, so that one client does not fill the gateway.
SOCKET_REQUESTS = 64
#: The most connections to each Redis: more commands at once only wait in Redis.
REDIS_CONNECTIONS = 32

# Floods

#: Requests that are read and then refused in a second, of all clients together; a client refused more often gets its
#: last refusal again, unread. One takes about 1 ms of this process and Redis: 2 % of a core.
FULL_REFUSALS_PER_S = 20.0
#: The same for one client in a row, which must be more than usual clients send at once; and what each client may have
#: in a second, however many are refused: what it may be given changes with its requests.
FULL_REFUSALS_AT_ONCE = 100.0
LEAST_FULL_REFUSALS_PER_S = 1.0
#: Bytes of a body that cost as much as the refusal of a small one.
REFUSED_BODY_BYTES = 16 << 10

# Requests that are kept until there is room (`Prefer: wait`)

#: Places at one gateway, and bytes of a prompt from which on a request takes another: 64 MiB of prompts at most.
KEPT_PLACES = 256
KEPT_BYTES_A_PLACE = 256 << 10
#: The most seconds that a request is kept: less than the minute that proxies usually wait for an answer to begin.
KEPT_S = 50.0
#: Seconds after a refusal for want of room in a cell until a kept request is tried there again, unless a request ends
#: before: 20 refusals a second, as many as a flood may cost.
KEPT_TRY_S = 0.05
#: The same after a refusal by a limit of its own key, which ends of its own requests change: others are not affected.
KEPT_OWN_TRY_S = 1.0
#: Seconds between two tries of a line at least, however many requests end.
KEPT_LEAST_S = 0.01

# Retries and waits

#: Bounds of Retry-After (seconds), and its largest random factor: clients that were refused together should not come
#: back together.
RETRY_AFTER_MIN_S = 1
RETRY_AFTER_MAX_S = 60
RETRY_AFTER_SPREAD = 1.5
#: Seconds for which ACCEPT is repeated while Redis cannot be reached; it is idempotent by request id. Longer than most
#: failovers: a client that gets 503 comes back a second later at the earliest.
ACCEPT_RETRY_S = 5.0
#: Seconds that an answer waits for a payload Redis that cannot be read: longer than a failover takes.
RESULT_RETRY_S = 60.0
#: Seconds that an ended step waits for memory for its answer; its results are kept for a minute.
ANSWER_ROOM_S = 45.0
#: The most cells that a request without a key or session is offered to: each refusal costs a round trip.
OFFERS = 3
#: Load of a cell, as a multiple of its share, above which another cell gets requests with its prefixes: a little more
#: than even, for the sake of the prefix caches.
CELL_LOAD_BOUND = 1.25
#: The longest deadline in seconds that a client may ask for: a week.
MAX_TIMEOUT_S = 7 * 24 * 3600.0

# Clients that leave, and requests that are lost

#: Seconds between two checks of the active requests.
REPAIR_EVERY_S = 1.0
#: Seconds without a log entry after which the record of a request is checked: most tokens come sooner.
SILENT_S = 5.0
#: Seconds after which a gateway without heartbeat counts as having no readers: others may then cancel its requests.
GATEWAY_TTL_S = 15
#: Least seconds between two attempts to cancel a request that another gateway reads.
CANCEL_AGAIN_S = 1.0
#: Seconds, at most, from the moment that a client asks for a request until it is one of its readers.
SOUGHT_S = 5.0
#: Seconds until the stream that wakes a gateway's blocking read expires, when its gateway has died.
WAKE_TTL_S = 60

# The end of a gateway

#: Seconds that clients have to read the message that their requests go on elsewhere.
LAST_WORDS_S = 5.0
#: Seconds in which a gateway that ends at once still writes what tells its readers so.
LAST_EVENT_S = 0.1
#: Seconds that a gateway that ends waits until the last spans are sent.
SPANS_FLUSH_S = 2.0

# How often it looks

#: Seconds between two checks that the key of an open socket or an endless stream still exists.
KEY_CHECK_S = 2.0
#: Seconds between two checks of readiness until NODE_READY is logged, and between two looks at the file of API keys
#: without a request.
READY_POLL_S = 0.5
KEY_FILE_POLL_S = 1.0
#: Seconds between two looks at the file of cells.
CELL_FILE_POLL_S = 1.0
#: Seconds for which an answer is used again, because a check reads the whole registry of workers. The second is for
#: answers with a reason against readiness, whose end should be seen soon.
READINESS_FRESH_S = 1.0
OBSTACLE_FRESH_S = 0.2
#: Seconds that a scrape or a probe waits for Redis: other cells may be ready.
PROBE_REDIS_S = 2.0
#: Seconds for which a reading of the KV pools is used again: they change when a worker starts.
POOLS_FRESH_S = 1.0

# Answers of unknown length, and traces

#: New tokens that admission counts for a chat that names no limit, and the least that it may generate: a usual answer.
EXPECTED_TOKENS = 128
#: The least number of such chats that fit into every KV pool, also if its worker runs fewer requests at once: one must
#: not keep the others out.
OPEN_ENDED_AT_ONCE = 16
#: The most requests that wait for their records to be read: Redis may be away.
TRACES_WAITING = 10_000
#: Number of spans of a request from which on a thread hands them over: each takes about 20 us.
THREADED_SPANS = 100
#: Seconds after the end of a request in which its stages may still write their last steps.
STEPS_SETTLE_S = 0.5
