-- CLAIM: one script takes the next jobs (re-runs first), deletes them, writes run and full route, reserves pages.
-- Several stages reserve all that a request may ever need, on each of them. One stage reserves nothing: it takes what its
-- free pages hold of known tokens now, and preempts when runs outgrow its pool.
-- There is no delivered-but-unrecorded state: a lost reply leaves the request on `on:<worker>`, where BEAT finds it.
-- A log that has tokens goes on under the numerics id that computed them; under another one only when MIGRATE has let it
-- go, no worker of its own id is back, and its client did not ask for `exact`.
-- Keeps I3, I4 (reservations), I11 (first runs by rank), I13.
-- ARGV: retention, worker, most jobs, milliseconds without a beat that make a worker dead, its free pages (one stage),
--   then that many random nonces
-- Answer: a list of {id, run, route, class, milliseconds since ACCEPT, solo, cold, body,
--   {committed tokens}, milliseconds until its deadline (-1: none)}; empty when there is nothing to do,
-- or while some stage has no live worker with room.
local me, most, silence = ARGV[2], tonumber(ARGV[3]), dead_after(ARGV[4])
local mine = redis.call('HMGET', P .. 'worker:' .. me, 'model', 'split', 'stage', 'device', 'numerics', 'pages', 'reserved', 'draining')
if not mine[1] or mine[3] ~= '0' or redis.call('EXISTS', P .. 'inbox:' .. me) == 0 then return {} end
if mine[8] or not is_alive(redis.call('ZSCORE', P .. 'workers', me), silence) then return {} end
promote()
local model, split, device, numerics = mine[1], mine[2], mine[4], mine[5]
local _, commas = string.gsub(split, ',', '')
local stages = commas + 1
local PAGE_TOKENS = 16
local all_pages, free_now = tonumber(mine[6]), tonumber(ARGV[5])

-- Of the workers of a stage and device so many at most are looked at: any of them will do, the least loaded of some is good.
local SAMPLE = 16

-- Ids of the workers of my split and numerics: roster[stage + 1][device], sorted.
local function roster()
  return kept(model, split .. ' ' .. numerics, function()
    local found, all = {}, registered()
    for s = 1, stages do found[s] = {gpu = {}, cpu = {}} end
    for i = 1, #all, 2 do
      local v = redis.call('HMGET', P .. 'worker:' .. all[i], 'model', 'split', 'numerics', 'stage', 'device')
      if v[1] == model and v[2] == split and v[3] == numerics then table.insert(found[tonumber(v[4]) + 1][v[5]], all[i]) end
    end
    for s = 1, stages do
      table.sort(found[s].gpu)
      table.sort(found[s].cpu)
    end
    return found
  end)
end

-- Those of them that live, are ready and do not drain: list of {id, pages, free pages, load}.
local function live(ids)
  local found = {}
  local first = #ids > SAMPLE and tonumber(string.sub(ARGV[6], 1, 8), 16) or 0
  for i = 1, math.min(#ids, SAMPLE) do
    local w = ids[(first + i) % #ids + 1]
    local v = redis.call('HMGET', P .. 'worker:' .. w, 'pages', 'reserved', 'draining')
    if v[1] and not v[3] and is_alive(redis.call('ZSCORE', P .. 'workers', w), silence)
      and redis.call('EXISTS', P .. 'inbox:' .. w) == 1 then
      found[#found + 1] = {id = w, pages = tonumber(v[1]), free = tonumber(v[1]) - tonumber(v[2] or '0'),
        load = redis.call('SCARD', P .. 'on:' .. w)}
    end
  end
  return found
end

-- Who could follow me in a route: candidates[stage][device], from stage 1 on. Asked only when there is something to claim.
local candidates
-- Whether every stage has somebody.
local function staffed()
  if not candidates then
    candidates = {}
    local known = stages > 1 and roster()
    for s = 1, stages - 1 do candidates[s] = {gpu = live(known[s + 1].gpu), cpu = live(known[s + 1].cpu)} end
  end
  for s = 1, stages - 1 do
    if #candidates[s].cpu + #candidates[s].gpu == 0 then return false end
  end
  return true
end

local function least_loaded(list, need)
  local best
  for _, c in ipairs(list) do
    if c.free >= need and (not best or c.load < best.load or (c.load == best.load and c.id < best.id)) then best = c end
  end
  return best
end

local first = {id = me, free = all_pages - tonumber(mine[7] or '0'), load = 0}
-- A member for every stage, me at the front; nil when some stage has no room or no worker of an allowed device.
local function find_route(need, class)
  if first.free < need then return nil end
  local route = {first}
  for s = 1, stages - 1 do
    local chosen = class == 'gpu' and least_loaded(candidates[s].gpu, need) or nil
    if not chosen and (class == 'cpu' or #candidates[s].gpu == 0) then chosen = least_loaded(candidates[s].cpu, need) end
    if not chosen then return nil end
    route[#route + 1] = chosen
  end
  return route
end

-- Whether some stage has nobody whose pool would hold so many pages even empty: then a job waits for another worker to
-- come, and nobody waits behind it.
local function fits_nowhere(need)
  for s = 0, stages - 1 do
    local most = s == 0 and all_pages or 0
    for _, list in pairs(s == 0 and {} or candidates[s]) do
      for _, c in ipairs(list) do most = math.max(most, c.pages) end
    end
    if most < need then return true end
  end
  return false
end

-- A CPU worker takes GPU-class jobs only where stage 0 has no live GPU worker; a GPU worker never takes CPU jobs.
local classes = device == 'gpu' and {'gpu'} or {'cpu', 'gpu'}
local function takes(class) return class == device or #live(roster()[1].gpu) == 0 end

-- A request to be tried alone comes alone, so that a worker that dies of its mere arrival has named it. Seconds until the
-- name is stale:
local TRIAL = 600
local answer, tried = {}, false

-- How many that fit nowhere are passed over.
local PASSED = 32

-- Whether somebody serves a numerics id and could hold the request; the workers are asked at most once.
local served = {}
local function is_served(id, r)
  served[r.class] = served[r.class] or serving(model, r.class, silence)
  return (served[r.class][id] or -1) >= r.need
end

-- Give one queued request to me, or pass it over. False: it has to wait, and everything behind it.
local function give(r)
  if r.v > PROTOCOL then
    finish(r, 'error', cjson.encode({error = 'the request was accepted under protocol ' .. r.v .. ' of the cell, and its '
      .. 'workers speak ' .. PROTOCOL, code = 'protocol'}))
    return true
  end
  if r.deadline > 0 and NOW > r.deadline then
    finish(r, 'expired', '')
    return true
  end
  local history = numerics
  if pinned(r) then
    local own = id_of(r.numerics)
    if own == numerics then
      history = r.numerics
    elseif is_served(own, r) then
      unqueue(r)
      pin(r)
      return true
    elseif r.exact == '1' then
      finish(r, 'error', cjson.encode({error = 'the request began under numerics id ' .. own .. ', no worker of it is left '
        .. 'that could hold it, and exact: true forbids going on under ' .. numerics, code = 'numerics_changed'}))
      return true
    else
      history = r.numerics .. '+' .. numerics .. '@' .. r.n
    end
  end
  local solo = r.deaths >= SOLO_AFTER and r.deaths_n == r.n
  if tried or (solo and #answer > 0) then return false end
  local held, now = r.need, math.ceil((r.prompt + r.n + 1) / PAGE_TOKENS)
  if stages == 1 then
    if r.need > all_pages then return true end
    if now > free_now then return false end
    held = 0
  end
  local route = find_route(held, r.class)
  if not route then return fits_nowhere(held) end
  if stages == 1 then free_now = free_now - now end
  local run, ids = ARGV[6 + #answer], {}
  for i, c in ipairs(route) do
    ids[i] = c.id
    c.free = c.free - held
    c.load = c.load + 1
    redis.call('SADD', P .. 'on:' .. c.id, r.id)
    redis.call('HINCRBY', P .. 'worker:' .. c.id, 'reserved', held)
  end
  unqueue(r)
  weigh(r, -1)
  r.state = 'running'
  weigh(r, 1)
  redis.call('HSET', P .. 'request:' .. r.id, 'state', 'running', 'run', run, 'route', table.concat(ids, ','), 'job', '',
    'held', held, 'numerics', history, 'moved', NOW, 'solo', solo and 1 or 0)
  if solo then
    redis.call('SET', P .. 'trying:' .. me, r.id, 'EX', TRIAL)
    tried = true
  end
  redis.call('HSETNX', P .. 'request:' .. r.id, 'claimed', NOW)
  note(r.id, 'c' .. r.class)
  if pinned(r) and history ~= r.numerics then note(r.id, 'n' .. numerics .. '@' .. r.n) end
  redis.call('ZADD', P .. 'running', 'XX', NOW, r.id)
  local tokens = {}
  for _, t in ipairs(redis.call('XRANGE', P .. 'log:' .. r.id, '-', '+')) do tokens[#tokens + 1] = tonumber(t[2][2]) end
  answer[#answer + 1] = {r.id, run, table.concat(ids, ','), r.class,
    NOW - tonumber(redis.call('HGET', P .. 'request:' .. r.id, 'accepted')),
    solo and 1 or 0, r.missing >= 2 and 1 or 0,
    redis.call('HGET', P .. 'request:' .. r.id, 'body'), tokens, r.deadline > 0 and r.deadline - NOW or -1}
  return true
end

for _, class in ipairs(classes) do
  local where = model .. ':' .. class
  for _, key in ipairs({P .. 'pinned:' .. where .. ':' .. numerics, P .. 'reruns:' .. where}) do
    local entries = redis.call('XRANGE', key, '-', '+', 'COUNT', most + PASSED)
    if #entries > 0 and takes(class) then
      if not staffed() then return answer end
      for _, entry in ipairs(entries) do
        if #answer >= most then return answer end
        local r = load(entry[2][2])
        if not r or r.state ~= 'queued' then
          redis.call('XDEL', key, entry[1])
        elseif not give(r) then
          return answer
        end
      end
    end
  end
end

-- First runs: those that would miss their deadline otherwise, then by rank.
for _, class in ipairs(classes) do
  local where = model .. ':' .. class
  local urgent = redis.call('ZRANGEBYSCORE', P .. 'due:' .. where, '-inf', NOW + URGENT, 'LIMIT', 0, most + PASSED)
  local ranked = redis.call('ZRANGE', P .. 'queue:' .. where, 0, most + PASSED - 1)
  if #urgent + #ranked > 0 and takes(class) then
    if not staffed() then return answer end
    for _, ids in ipairs({urgent, ranked}) do
      for _, id in ipairs(ids) do
        if #answer >= most then return answer end
        local rank = redis.call('ZSCORE', P .. 'queue:' .. where, id)
        local r = rank and load(id)
        if not r or r.state ~= 'queued' then
          redis.call('ZREM', P .. 'queue:' .. where, id)
          redis.call('ZREM', P .. 'due:' .. where, id)
        elseif not give(r) then
          return answer
        elseif r.state == 'running' then
          advance(where, tonumber(rank))
        end
      end
    end
  end
end
return answer
