-- ACCEPT: check limits, write the record, queue the first job. Idempotent by request id: a known id is never refused.
-- With an Idempotency-Key the id derives from the key, so another body may arrive under a known id: the fingerprint of the
-- body that made the record decides. A request that ended because no client read it ('abandoned') counts as forgotten.
-- Keeps I2, I9 (one key is one request), I10 (steps follow each other), I14 (with a WAIT after it).
-- needs: requests/record, queue/outstanding, requests/timeline, requests/tensor_results, queue/fair_queue, workers/fleet, queue/wait_forecast
-- Arguments: request, model, pages_needed, deadline_ms (0: none), body, prompt_tokens, max_tokens,
--   fingerprint ('' without a key), retention_s (0: the cell's), tenant, its weight, priority,
--   exact (never under another numerics id, nor on nondeterministic devices), grammar (id of the workers that read its grammar;
--   '': it has none), fallback (deny | recompute | max:<limit>; nothing: allow),
--   reader (gateway that will read a request that exists; '': none does), result_bytes (0: none),
--   confirm (write even if the request exists: WAIT follows), limits (blockrelay.protocol.transitions.calls.Limits and
--   `in_flight`; 0 is no limit, except for `in_flight`), session (calls.SessionStep) or nothing, binding (calls.Binding) or nothing
-- Answers: OK ms | EXISTS state | OTHER | MOVED version (of the list of cells that gives it to another cell) | TOO_LARGE pages
--   | NO_GRAMMAR (no worker of the first stage reads its grammar) | NOT_EXACT (all routes are nondeterministic, and have been for a while) | STEP expected-step | REPEAT request-id,
--   or a limit and the ms after which to try again: TOKENS left | CONCURRENT requests | SHARE requests | BUSY in-flight |
--   PAGES promised | WAIT ms | LATE ms (until its end) | RESULTS bytes promised | TENANT_RESULTS bytes promised
local id, model, pages_needed, deadline_ms = ARGS.request, ARGS.model, ARGS.pages_needed, ARGS.deadline_ms
local prompt_tokens, max_tokens = ARGS.prompt_tokens, ARGS.max_tokens
local tenant, weight, priority, limits = ARGS.tenant, ARGS.weight, ARGS.priority, ARGS.limits
local per_minute, others, result = limits.tokens_per_minute, limits.others, ARGS.result_bytes
local known = redis.call('HMGET', P .. 'request:' .. id, 'state', 'fingerprint', 'abandoned')
if known[1] and not known[3] then
  if (known[2] or '') ~= ARGS.fingerprint then return {'OTHER'} end
  if ARGS.reader ~= '' then
    -- Written here, so that no FINISH of an abandoned request comes between this call and the gateway's first read.
    redis.call('HSET', P .. 'followers:' .. id, ARGS.reader, '')
    redis.call('EXPIRE', P .. 'followers:' .. id, retention())
  end
  if ARGS.confirm then write_for_wait(model) end
  return {'EXISTS', known[1]}
end

-- A request with a key or session that is not here may be in another cell, by a newer list of cells than the caller's.
local bound = ARGS.binding or {name = ARGS.fingerprint ~= '' and id or '', version = 0}
local moved = bound.name ~= '' and redis.call('GET', P .. 'moved:' .. bound.name)
if moved and tonumber(moved) > bound.version then return {'MOVED', moved} end

local session, append
local asked = ARGS.session
if asked then
  session = P .. 'session:' .. asked.session
  local step = tonumber(redis.call('HGET', session, 'step') or '0')
  local length = tonumber(redis.call('HGET', session, 'length') or '0')
  if asked.step == step and step > 0 and redis.call('HGET', session, 'fingerprint') == asked.fingerprint then
    local previous = redis.call('HGET', session, 'request')
    local ended = redis.call('HGET', P .. 'request:' .. previous, 'end')
    local there = redis.call('EXISTS', P .. 'request:' .. previous) == 1
    if there and (not ended or ended == 'tensor') then
      if ARGS.confirm then write_for_wait(model) end
      return {'REPEAT', previous}
    end
  elseif asked.step == step + 1 and length == asked.length then
    append = true
  else
    return {'STEP', step + 1}
  end
end

-- A request that fits no pool even alone would wait for ever. Without workers the pools are not known: it may wait.
local found = kept(model, 'survey', function() return survey(model) end)
for _, pages in pairs(found.largest) do
  if pages < pages_needed then return {'TOO_LARGE', pages} end
end
if ARGS.grammar ~= '' and found.workers > 0 and not found.grammars[ARGS.grammar] then return {'NO_GRAMMAR'} end
local among_varying = ARGS.exact and found.varies
if among_varying and not found.steady and redis.call('EXISTS', P .. 'exact-left:' .. model) == 0 then return {'NOT_EXACT'} end

-- The tenant's limits. Its token bucket holds one minute's tokens and fills continuously.
local bucket, level = P .. 'bucket:' .. tenant, 0
if per_minute > 0 then
  local v = redis.call('HMGET', bucket, 'level', 'at')
  local since = NOW - tonumber(v[2] or NOW)
  if since < 0 then since = 60000 end  -- the clock was set back: fill the bucket instead of waiting for the clock
  level = math.min(per_minute, tonumber(v[1] or per_minute) + since * per_minute / 60000)
  local lacks = prompt_tokens + max_tokens + limits.others_tokens - level
  if lacks > 0 then return {'TOKENS', math.floor(level), math.ceil(lacks * 60000 / per_minute)} end
end
if limits.concurrency > 0 then
  local mine = redis.call('SCARD', P .. 'tenant-requests:' .. tenant)
  if mine + others >= limits.concurrency then return {'CONCURRENT', mine, 1000} end
end

-- Limits of tensor results on the payload Redis. First drop the accounting of results whose time is over, 512 at a time.
if result > 0 then
  local over = redis.call('ZRANGE', P .. 'results', '-inf', NOW, 'BYSCORE', 'LIMIT', 0, 512)
  for _, gone in ipairs(over) do strike_result(gone) end
  for _, check in ipairs({{'TENANT_RESULTS', ' ' .. tenant, limits.tenant_result_bytes},
    {'RESULTS', '', limits.result_bytes}}) do
    local status, sum, limit = check[1], check[2], check[3]
    local promised = tonumber(redis.call('HGET', P .. 'result-bytes', sum) or '0')
    if limit > 0 and promised + result + limits.others_result_bytes > limit then
      local soonest = tonumber(redis.call('ZRANGE', P .. 'results', 0, 0, 'WITHSCORES')[2]) or math.huge
      return {status, promised, soonest < math.huge and math.max(1000, soonest - NOW) or 1000}
    end
  end
end

-- The capacity of the cell.
local in_flight = redis.call('ZCARD', P .. 'running')
if in_flight + others >= limits.in_flight then return {'BUSY', in_flight, 1000} end
if limits.share then
  local mine = redis.call('SCARD', P .. 'tenant-requests:' .. tenant)
  if mine + others + 1 > limits.in_flight - in_flight - others then return {'SHARE', mine, 1000} end
end
-- Nondeterministic devices may not take an exact request, and a GPU that joins later may be one: it is queued for CPUs.
local class = not ARGS.exact and redis.call('HGET', P .. 'plan:' .. model, 'class') or 'cpu'
local outstanding = outstanding_of(model)
local more_pages = limits.each and limits.others_pages or pages_needed * others
if limits.overcommit > 0 and found.pages and (outstanding.pages > 0 or limits.each and others > 0)
  and outstanding.pages + pages_needed + more_pages > found.pages * limits.overcommit then
  return {'PAGES', outstanding.pages, 1000}
end
local due
if found.token then
  local rank = next_rank(P .. 'shares:' .. model .. ':' .. class, priority, weight, tenant)
  local need, rows = pages_needed * (1 + others), prompt_tokens + limits.others_tokens
  local own_before = 0
  if limits.each then  -- forecast for the last of them, with the others before it in the queue
    rank, own_before = rank + math.ceil(limits.others_tokens / weight), limits.others_tokens
    need, rows = pages_needed, prompt_tokens
    outstanding.queued_rows = outstanding.queued_rows + limits.others_rows
    outstanding.queued_tokens = outstanding.queued_tokens + limits.others_tokens - limits.others_rows
    outstanding.pages = outstanding.pages + limits.others_pages
  end
  local before = tokens_before(P .. 'shares:' .. model .. ':' .. class, rank)
  local wait, first, all = forecast(found, outstanding, in_flight + others, need, rows, max_tokens, before and before + own_before)
  local longest_wait = math.floor(1000 * limits.wait_s)
  if longest_wait > 0 and 1000 * (wait + first) > longest_wait then
    return {'WAIT', math.ceil(1000 * (wait + first)), math.ceil(1000 * (wait + first)) - longest_wait}
  end
  if deadline_ms > 0 then
    local late = NOW + 1000 * (QUEUE_MARGIN * wait + RUN_MARGIN * all + SPARE) - deadline_ms
    if limits.enforce_deadline and late > 0 then return {'LATE', math.ceil(1000 * (wait + all)), math.ceil(late)} end
    due = deadline_ms - 1000 * (RUN_MARGIN * all + SPARE)
  end
elseif deadline_ms > 0 then
  -- No worker has measured itself yet: a few requests may have a deadline, and workers measure themselves on those.
  if limits.enforce_deadline and (in_flight + others >= UNMEASURED or deadline_ms <= NOW) then return {'LATE', 0, 1000} end
  due = deadline_ms
end

if known[1] then redis.call('DEL', P .. 'request:' .. id, P .. 'log:' .. id) end
if moved then redis.call('DEL', P .. 'moved:' .. bound.name) end
redis.call('HSET', P .. 'request:' .. id, 'v', SPOKEN, 'state', 'queued', 'model', model, 'class', class,
  'pages_needed', pages_needed, 'prompt_tokens', prompt_tokens, 'max_tokens', max_tokens, 'rows_to_compute', prompt_tokens,
  'deadline_ms', deadline_ms, 'body', ARGS.body, 'committed', 0, 'run', '', 'route', '', 'accepted_ms', NOW,
  'progress_ms', NOW, 'tenant', tenant)
if ARGS.fingerprint ~= '' then redis.call('HSET', P .. 'request:' .. id, 'fingerprint', ARGS.fingerprint) end
if ARGS.retention_s > 0 then redis.call('HSET', P .. 'request:' .. id, 'retention_s', ARGS.retention_s) end
if ARGS.exact then redis.call('HSET', P .. 'request:' .. id, 'exact', 1) end
if ARGS.grammar ~= '' then redis.call('HSET', P .. 'request:' .. id, 'grammar', ARGS.grammar) end
if ARGS.fallback then redis.call('HSET', P .. 'request:' .. id, 'fallback', ARGS.fallback) end
if result > 0 then
  redis.call('HSET', P .. 'request:' .. id, 'result_bytes', result)
  book_result(id, tenant, result)
end
redis.call('ZADD', P .. 'running', NOW, id)
redis.call('SADD', P .. 'tenant-requests:' .. tenant, id)
if per_minute > 0 then
  local charged = prompt_tokens + max_tokens + (limits.each and 0 or limits.others_tokens)
  redis.call('HSET', bucket, 'level', string.format('%.3f', level - charged), 'at', NOW)
  redis.call('HSETNX', bucket, 'since', NOW)
  redis.call('EXPIRE', bucket, 120)
end
if session then
  redis.call('HSET', session, 'v', SPOKEN, 'step', asked.step, 'fingerprint', asked.fingerprint, 'request', id)
  if append then
    local tokens = (redis.call('HGET', session, 'tokens') or '') .. asked.tokens
    redis.call('HSET', session, 'tokens', tokens, 'length', string.len(tokens) / 4)
  end
  redis.call('EXPIRE', session, retention())
end
local r = {id = id, model = model, class = class, state = 'queued', rows_to_compute = prompt_tokens,
  max_tokens = max_tokens, committed = 0}
redis.call('HINCRBY', P .. 'outstanding:' .. model, 'pages', pages_needed)
redis.call('HINCRBY', P .. 'totals:' .. model, 'accepted', 1)
account(r, 1)
queue_up(r, priority, weight, tenant, prompt_tokens + max_tokens, due)
return {'OK', string.format('%d', NOW)}
