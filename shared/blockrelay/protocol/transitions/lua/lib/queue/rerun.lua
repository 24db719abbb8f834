-- A run is over, its request is not, unless it has ended too many workers: queued again, quarantined, or ended as poison.
-- needs: requests/finish, requests/timeline, requests/dead_letters

-- `at`: the log's length at that moment; COMMIT adds `rows`. `code`: the error code of the failure (nil: not known).
local function add_fallback(r, block, reason, code)
  local list = r.fallbacks ~= '' and cjson.decode(r.fallbacks) or {}
  list[#list + 1] = {block_id = block, from = 'GPU', to = 'CPU', reason = reason, error_code = code, at = r.committed}
  r.fallbacks = cjson.encode(list)
end

-- First blocks of the stages that GPUs have in a route, and the one that failed. They fail together where they are one
-- device, and only the first of its stages to say so finds the request there.
local function gpus_of(route, failed)
  local blocks = {failed}
  for _, w in ipairs(members(route)) do
    local v = redis.call('HMGET', P .. 'worker:' .. w, 'device', 'first_block')
    if v[1] == 'gpu' then blocks[#blocks + 1] = 'block_' .. v[2] end
  end
  return table.concat(blocks, ',')
end

-- Keeps I3, I7, I16.
-- End the current run and queue the request once more. `block` is where a GPU failed, or nil, and `stage` which one that
-- was (nil: not known): the next route has a CPU there, and no worker of the numerics id is waited for; where the request
-- denies that, it waits for GPUs of all stages that had one. `found`: how many leading tokens have KV pages in the stage
-- that lacked some, or that left its GPU (nil: not known); until it has a token the next run takes no more of them
-- anywhere. Re-runs and deaths count only at an unchanged log length; the second re-run waits, and each one after it
-- twice as long. `tried` is the request that a dead worker tried alone, or nil: with it nobody else is to blame. `failure`
-- {reason, code} of the GPU, as fine as its fallback event says it (nil: as `reason`).
local function rerun(r, reason, block, tried, stage, found, failure)
  local set = {'state', 'queued', 'run', '', 'route', '', 'progress_ms', NOW, 'rerun_reason', reason}
  if reason == 'missing_pages' then
    set[#set + 1] = 'missing_pages'; set[#set + 1] = r.missing_pages + 1
  end
  local nearer = found and (r.reusable == '' or found < tonumber(r.reusable))
  if nearer then
    set[#set + 1] = 'reusable'; set[#set + 1] = found
  end
  if r.deaths_at ~= r.committed then r.deaths, r.quarantine_deaths, r.attempts = 0, 0, 0 end
  local blameless = reason == 'drain' or nearer or (reason == 'death' and tried and tried ~= r.id)
  if reason == 'death' and not blameless then
    r.deaths = r.deaths + 1
    if tried then r.quarantine_deaths = r.quarantine_deaths + 1 end
    if r.quarantine_deaths >= MAX_QUARANTINE_DEATHS then
      local said = 'the request ended its worker ' .. r.deaths .. ' times at the same position and is kept as a dead letter'
      dead_letter(r, 'poison', said)
      finish(r, 'error', cjson.encode({error = said, code = 'poison'}))
      return
    end
  end
  if not blameless then r.attempts = r.attempts + 1 end
  for _, f in ipairs({'deaths', 'quarantine_deaths', 'attempts'}) do set[#set + 1] = f; set[#set + 1] = r[f] end
  set[#set + 1] = 'deaths_at'; set[#set + 1] = r.committed
  release(r)
  account(r, -1)
  r.state, r.rows_to_compute = 'queued', r.prompt_tokens + r.committed
  set[#set + 1] = 'rows_to_compute'; set[#set + 1] = r.rows_to_compute
  account(r, 1)
  local denied = block and r.fallback == 'deny'
  if denied then
    local since = r.denied_ms > 0 and r.denied_ms or NOW
    for _, v in ipairs({'denied_block', gpus_of(r.route, block), 'denied_ms', since}) do set[#set + 1] = v end
  elseif block then
    failure = failure or {}
    add_fallback(r, block, failure.reason or (reason == 'death' and 'worker_death' or reason), failure.code)
    if (stage or 0) == 0 then r.class = 'cpu' end
    for _, v in ipairs({'class', r.class, 'fallbacks', r.fallbacks}) do set[#set + 1] = v end
  end
  redis.call('HSET', P .. 'request:' .. r.id, unpack(set))
  redis.call('HINCRBY', P .. 'request:' .. r.id, 'reruns', 1)
  redis.call('HINCRBY', P .. 'totals:' .. r.model, 'reruns:' .. reason, 1)
  local waits = pinned(r) and not block
  timeline_event(r.id, 'r' .. reason .. '@' .. r.committed .. (waits and '=' .. id_of(r.numerics) or ''))
  if block then timeline_event(r.id, (denied and 'd' or 'f') .. block) end
  redis.call('ZADD', P .. 'running', 'XX', NOW, r.id)
  if r.attempts > 1 and not blameless then
    enqueue_later(r, math.min(LONGEST_DELAY, FIRST_DELAY * 2 ^ (r.attempts - 2)))
  elseif waits then
    pin(r)
  else
    enqueue(r)
  end
end
