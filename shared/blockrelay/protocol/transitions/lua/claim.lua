-- CLAIM: gives the next jobs (re-runs first) to a worker of the first stage: removes them from the queue, writes run id and
-- route, reserves KV pages. A route of several stages reserves on each worker those that the request needs at its present
-- length, of a pool that would hold all that it may ever need; COMMIT reserves more. A worker of the whole model reserves
-- nothing: it takes requests whose present tokens fit its free pages, and preempts when runs outgrow its pool.
-- No job can be delivered without a record: after a lost reply the request is in `worker-requests:<worker>`, where BEAT finds it.
-- A log with tokens continues under the numerics id that computed them; under another one only if MIGRATE has let it go, no
-- worker of its id is back, and its client did not ask for `exact`. If a nondeterministic worker computed them, any worker
-- may continue it, since none could compute them again. Routes of `exact` requests have no nondeterministic workers.
-- A worker that retires, because the plan gives it another block folder, takes only requests that have tokens of its numerics
-- id, also those that MIGRATE has released; no other request has a route through it.
-- A request with a grammar runs where the first and the last stage read grammars as its gateway does: the first knows which
-- tokens are forced, the last which ones are allowed.
-- A request that denies fallbacks and whose GPU failed waits for GPUs for all stages that had one; a scheduler ends it when
-- none come.
-- Keeps I3, I4 (reservations), I11 (first runs by rank), I13, I15 (which pages are private), I16, I17, I18.
-- needs: requests/record, requests/timeline, requests/provenance, requests/finish, queue/fair_queue, workers/fleet, workers/serving, workers/routes, workers/spill
-- Arguments: worker, free_pages (of a worker of the whole model), runs (random run ids, one for each job that it may get)
-- Answer: a list of {id, run, route, class, milliseconds since ACCEPT, quarantined, leading tokens whose KV pages may be
--   reused at most (-1: any), body, {committed tokens}, milliseconds until its deadline (-1: none), runs before this one,
--   whether this route or an earlier one is nondeterministic}; empty when there is nothing to do, or while a stage has no
--   live worker with room.
local runs, free_now = ARGS.runs, ARGS.free_pages
local max_requests, chance = #runs, runs[1]
if not claims(ARGS.worker) then return {} end
promote()

-- A quarantined request is given alone, so that a worker that it ends at once is known to have ended because of it.
local answer, tried = {}, false

-- Requests that this worker cannot take are passed over: up to PASSED at the front of a queue, then up to FURTHER behind the
-- place that earlier calls reached. Each call looks further, so a request for it is found whatever stands before it.
local PASSED, FURTHER = 32, 128

-- Whether live workers serve a numerics id and have pools for the request. The registry is read at most once per call.
local served
local function is_served(id, r)
  served = served or serving(me.model)
  return (served[id] or -1) >= r.pages_needed
end

-- Numbers of the blocks that failed on a GPU under the request.
local function failed_blocks(r)
  local found = {}
  for _, event in ipairs(r.fallbacks ~= '' and cjson.decode(r.fallbacks) or {}) do
    found[#found + 1] = tonumber(string.match(event.block_id, '%d+$'))
  end
  return found
end

-- Leading tokens whose KV pages the run may reuse at most, -1 for any. A request of shared pages reuses none after two runs
-- that lacked pages. One of private pages keeps its limit, which each such run lowers to what all stages have.
local function reusable_of(r, private)
  if (r.missing_pages >= 2 and not private) or (r.fallback == 'recompute' and r.fallbacks ~= '') then return 0 end
  return r.reusable ~= '' and tonumber(r.reusable) or -1
end

-- Gives one queued request to this worker, ends it, or passes it over. False: it has to wait, and all behind it.
local function give(r)
  if r.v < LOWEST_PROTOCOL or r.v > PROTOCOL then
    finish(r, 'error', cjson.encode({error = 'the request was accepted under protocol ' .. r.v .. ' of the cell, which its '
      .. 'workers do not speak', code = 'protocol'}))
    return true
  end
  if r.deadline_ms > 0 and NOW > r.deadline_ms then
    finish(r, 'expired', '')
    return true
  end
  local keeps = pinned(r) and id_of(r.numerics) == me.numerics
  if me.retires and not keeps then return true end
  if not reads(me, r.grammar) then return true end
  local pure = r.exact == '1'
  if pinned(r) then
    local own = id_of(r.numerics)
    if is_served(own, r) then
      if not keeps then
        unqueue(r)
        pin(r)
        return true
      end
      pure = true
    elseif keeps then
      pure = pure or string.sub(r.job, 1, 6) == 'pinned'  -- MIGRATE has not released it from its numerics id
    elseif pure then
      finish(r, 'error', cjson.encode({error = 'the request began under numerics id ' .. own .. ', no worker of it is left '
        .. 'that could hold it, and exact: true forbids going on under ' .. me.numerics, code = 'numerics_changed'}))
      return true
    end
  end
  local quarantined = r.deaths >= QUARANTINE_AFTER and r.deaths_at == r.committed
  if tried or (quarantined and #answer > 0) then return false end
  local reserve = pages_now(r)
  if #me.stages == 1 then
    if r.pages_needed > me.pages then return true end
    if pages_of(r, 0) > free_now then return false end
    reserve = 0
  end
  local denied = r.denied_block ~= ''
  for block in string.gmatch(r.denied_block, '%d+') do
    if not has_gpu(tonumber(block)) then return true end
  end
  local spill = not pure and may_spill(r) and function(s, gpus, cpus)
    return within_limit(r, s) and sooner_on_cpu(s, gpus, cpus, reserve, r.pages_needed)
  end
  local route = find_route(reserve, r.pages_needed, failed_blocks(r), pure, keeps, r.grammar, spill)
  if not route then
    -- A request with tokens whose pool is another worker's is not overtaken: this one would go on filling the later workers.
    local elsewhere = #me.stages > 1 and r.committed > 0 and r.pages_needed > me.pages and is_served(me.numerics, r)
    return not elsewhere and fits_nowhere(r.pages_needed, pure, keeps, r.grammar)
  end
  if #me.stages == 1 then free_now = free_now - pages_of(r, 0) end
  local numerics, varies = numerics_of(route)
  local history, goes_on = numerics, r.committed > 0 and r.numerics ~= ''
  if goes_on then
    history = id_of(r.numerics) == numerics and r.numerics or r.numerics .. '+' .. numerics .. '@' .. r.committed
  end
  -- Without a committed token a nondeterministic device has decided nothing: the request starts again, and the id of its
  -- log is that of the new route.
  local run, ids, private = runs[#answer + 1], {}, varies or (r.private == 1 and r.committed > 0)
  for i, c in ipairs(route) do
    ids[i] = c.id
    c.free = c.free - reserve
    c.running = c.running + 1
    redis.call('SADD', P .. 'worker-requests:' .. c.id, r.id)
    redis.call('HINCRBY', P .. 'worker:' .. c.id, 'pages_reserved', reserve)
  end
  local blocks = placed(route)
  unqueue(r)
  account(r, -1)
  r.state = 'running'
  account(r, 1)
  redis.call('HSET', P .. 'request:' .. r.id, 'state', 'running', 'run', run, 'route', table.concat(ids, ','), 'job', '',
    'pages_reserved', reserve, 'grow_at', #me.stages > 1 and grow_at(r, reserve) or 0, 'numerics', history, 'varies', varies and 1 or 0, 'private', private and 1 or 0, 'progress_ms', NOW, 'quarantined', quarantined and 1 or 0,
    'steps', 0, 'gpu_blocks', blocks.gpu, 'cpu_blocks', blocks.cpu)
  if denied then redis.call('HDEL', P .. 'request:' .. r.id, 'denied_block', 'denied_ms') end
  if quarantined then
    redis.call('SET', P .. 'quarantine:' .. me.id, r.id, 'EX', QUARANTINE_S)
    tried = true
  end
  redis.call('HSETNX', P .. 'request:' .. r.id, 'claimed_ms', NOW)
  timeline_event(r.id, 'c' .. r.class)
  note_run(r, route, me.split, numerics, tonumber(redis.call('HGET', P .. 'request:' .. r.id, 'reruns') or '0'))
  if goes_on and history ~= r.numerics then timeline_event(r.id, 'n' .. numerics .. '@' .. r.committed) end
  redis.call('ZADD', P .. 'running', 'XX', NOW, r.id)
  local tokens = {}
  for _, t in ipairs(redis.call('XRANGE', P .. 'log:' .. r.id, '-', '+')) do tokens[#tokens + 1] = tonumber(t[2][2]) end
  local known = redis.call('HMGET', P .. 'request:' .. r.id, 'accepted_ms', 'body', 'reruns')
  answer[#answer + 1] = {r.id, run, table.concat(ids, ','), r.class, NOW - tonumber(known[1]),
    quarantined and 1 or 0, reusable_of(r, private), known[2], tokens,
    r.deadline_ms > 0 and r.deadline_ms - NOW or -1, tonumber(known[3] or '0'), private and 1 or 0}
  return true
end

-- How far into a queue this worker has passed over requests, in its record; nil: start behind the queue's front. Requests
-- that leave the queue before that place shift it, so some may be skipped; the next round from the front finds them.
local function place_in(key) return redis.call('HGET', P .. 'worker:' .. me.id, 'passed ' .. string.sub(key, #P + 1)) end
local function keep_place(key, place)
  local mine, field = P .. 'worker:' .. me.id, 'passed ' .. string.sub(key, #P + 1)
  if place then redis.call('HSET', mine, field, place) else redis.call('HDEL', mine, field) end
end

local WINDOW = max_requests + PASSED

-- True if the request before was passed over. Then the next one probably is too, and a short read may show it: it has no
-- tokens and needs more pages than this worker's pool, or GPUs that are not there; or this worker retires.
local passing = false
local function is_passed(id)
  if not passing then return false end
  local v = redis.call('HMGET', P .. 'request:' .. id, 'state', 'committed', 'pages_needed', 'deadline_ms', 'v', 'denied_block')
  local number = tonumber(v[5] or '') or 0
  if v[1] ~= 'queued' or v[2] ~= '0' or number < LOWEST_PROTOCOL or number > PROTOCOL or (v[4] ~= '0' and NOW > tonumber(v[4])) then return false end
  if me.retires then return true end
  if #me.stages == 1 and tonumber(v[3]) > me.pages then return true end
  for block in string.gmatch(v[6] or '', '%d+') do
    if not has_gpu(tonumber(block)) then return true end
  end
  return false
end

-- Each of these functions gives this worker the requests of one list. Returns true when it can get no more in this call.

local function give_entries(key, entries)
  local last
  for _, entry in ipairs(entries) do
    if #answer >= max_requests then return true, last end
    local id = entry[2][2]
    if not is_passed(id) then
      local r = read_record(id)
      if not r or r.state ~= 'queued' then
        redis.call('XDEL', key, entry[1])
      elseif not give(r) then
        return true, last
      end
      passing = r and r.state == 'queued'
    end
    last = entry[1]
  end
  return false, last
end

local function give_stream(key, front)
  local over, last = give_entries(key, front)
  if over or #front < WINDOW then return over end
  local from = place_in(key) or last
  local behind = redis.call('XRANGE', key, '(' .. from, '+', 'COUNT', FURTHER)
  over, last = give_entries(key, behind)
  if over or #behind == FURTHER then keep_place(key, last or from) else keep_place(key, nil) end
  return over
end

local function give_first_runs(where, ids)
  local queue, passed = P .. 'queue:' .. where, 0
  for _, id in ipairs(ids) do
    if #answer >= max_requests then return true, passed end
    if is_passed(id) then
      passed = passed + 1
    else
      local rank = redis.call('ZSCORE', queue, id)
      local r = rank and read_record(id)
      if not r or r.state ~= 'queued' then
        redis.call('ZREM', queue, id)
        redis.call('ZREM', P .. 'due:' .. where, id)
      elseif not give(r) then
        return true, passed
      elseif r.state == 'running' then
        advance(where, tonumber(rank))
      end
      passing = r and r.state == 'queued'
      if passing then passed = passed + 1 end
    end
  end
  return false, passed
end

local function give_queue(where, front)
  local queue = P .. 'queue:' .. where
  local over, passed = give_first_runs(where, front)
  if over or #front < WINDOW then return over end
  local from = math.max(tonumber(place_in(queue) or 0), passed)
  local behind = redis.call('ZRANGE', queue, from, from + FURTHER - 1)
  over, passed = give_first_runs(where, behind)
  if over or #behind == FURTHER then keep_place(queue, from + passed) else keep_place(queue, nil) end
  return over
end

for _, class in ipairs(classes()) do
  local where = me.model .. ':' .. class
  -- Requests that wait for this worker's numerics id are taken in both classes: no other device will take them.
  local mine = P .. 'pinned:' .. where .. ':' .. me.numerics
  for _, key in ipairs({mine, P .. 'reruns:' .. where}) do
    local front = redis.call('XRANGE', key, '-', '+', 'COUNT', WINDOW)
    if #front > 0 and (key == mine or takes(class, chance)) then
      if not staffed(chance) or give_stream(key, front) then return answer end
    end
  end
end

if me.retires then return answer end

-- First runs: those whose deadline is near, then by rank.
for _, class in ipairs(classes()) do
  local where = me.model .. ':' .. class
  local urgent = redis.call('ZRANGEBYSCORE', P .. 'due:' .. where, '-inf', NOW + URGENT, 'LIMIT', 0, WINDOW)
  local front = redis.call('ZRANGE', P .. 'queue:' .. where, 0, WINDOW - 1)
  if #urgent + #front > 0 and takes(class, chance) then
    if not staffed(chance) or give_first_runs(where, urgent) or give_queue(where, front) then return answer end
  end
end

-- First runs that wait for GPUs and end sooner here. Those before them end sooner on a GPU and keep their ranks, and the virtual
-- time stays with what GPUs claim.
local waiting = me.device == 'cpu' and redis.call('ZCARD', P .. 'queue:' .. me.model .. ':gpu') or 0
local gpus = waiting > 0 and staffed(chance) and first_gpus(chance) or {}
while #gpus > 0 and #answer < max_requests do
  measure(0, gpus, {me})
  local before, given = spills_behind(me, gpus), #answer
  if not before then break end
  for _, id in ipairs(redis.call('ZRANGE', P .. 'queue:' .. me.model .. ':gpu', before, before + PASSED - 1)) do
    local r = #answer == given and read_record(id)
    if r and r.state == 'queued' and may_spill(r) and within_limit(r, 0) and not give(r) then return answer end
  end
  if #answer == given then break end
end
return answer
