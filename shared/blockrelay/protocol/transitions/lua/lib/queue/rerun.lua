-- Queues a request again after a failed run, in quarantine if it ended workers; ends it as poison if it ended too many.
-- needs: requests/finish, requests/timeline, requests/dead_letters, workers/slowdown

-- Returns the process that a worker is in, its id without the nonce; nil: the id has no such form.
local function process_of(worker) return string.match(worker, '^(.+:%d+):[^:]+$') end

-- Returns the stages that a `failure` takes from GPUs, {stage, block_id, first, last, us (of a step there)} each: the stage that failed, and those of
-- the same process for which `failure.lost(worker)` is true. `block_id` is the block that the failure names, in the stage that
-- has it, and the first block of any other stage.
local function fallen(r, failure)
  local route, found, named = members(r.route), {}, tonumber(string.match(failure.block, '%d+$')) or 0
  local failed = (failure.stage or 0) + 1
  local process = route[failed] and process_of(route[failed])
  for s, w in ipairs(route) do
    if s == failed or (process and process == process_of(w) and failure.lost(w)) then
      local v = redis.call('HMGET', P .. 'worker:' .. w, 'first_block', 'last_block', 'device')
      local first, last = tonumber(v[1] or ''), tonumber(v[2] or '')
      if s == failed and not first then first, last = named, named end
      if first and (s == failed or v[3] == 'gpu') then
        local block = first <= named and named <= last and failure.block or 'block_' .. first
        found[#found + 1] = {stage = s, block_id = block, first = first, last = last, us = measured_us(w, first, last)}
      end
    end
  end
  return found
end

-- Returns why the policy of a request, `max:<limit>`, keeps CPUs from `stages` that GPUs had, as {block, message}; nil: it does
-- not. `predicted`: the slowdowns that schedulers predict.
local function too_slow(r, stages, predicted)
  local limit = string.match(r.fallback, '^max:(.+)$')
  for _, one in ipairs(limit and stages or {}) do
    local blocks = string.format('%d-%d', one.first, one.last)
    local ratio, asked = predicted[blocks], ' and the request allows a max_slowdown of ' .. string.format('%.10g', tonumber(limit))
    if not ratio then
      return {one.block_id, 'a GPU failed at ' .. one.block_id .. asked .. ', but how slow a CPU would be is not known for blocks '
        .. blocks .. ': no CPU worker has them, or one of both has neither measured times nor a profile'}
    elseif ratio > tonumber(limit) then
      return {one.block_id, 'a GPU failed at ' .. one.block_id .. asked .. ', but a CPU is predicted to take '
        .. string.format('%.4g', ratio) .. ' times as long for blocks ' .. blocks}
    end
  end
end

-- Adds one fallback event for each of `stages` to the record and returns them. `at`: the log's length now; `blocks`: the first
-- and the last of the stage; `predicted`: how many times as long it is expected to take; `us`: of a step on the GPU. COMMIT adds
-- `rows`, and the end of the request sets `success` and `seen`.
local function add_fallbacks(r, stages, reason, code, predicted)
  local list, added = r.fallbacks ~= '' and cjson.decode(r.fallbacks) or {}, {}
  for i, one in ipairs(stages) do
    local ratio = predicted[string.format('%d-%d', one.first, one.last)]
    added[i] = {block_id = one.block_id, blocks = {one.first, one.last}, from = 'GPU', to = 'CPU', reason = reason,
      error_code = code, at = r.committed, success = false, predicted = ratio and told_slowdown(ratio), us = one.us}
    list[#list + 1] = added[i]
  end
  r.fallbacks = cjson.encode(list)
  return added
end

-- Returns the block that failed and the first blocks of all stages of a route on GPUs. Stages on one device fail together, and
-- only the first report of them finds the run current.
local function gpus_of(route, failed)
  local blocks = {failed}
  for _, w in ipairs(members(route)) do
    local v = redis.call('HMGET', P .. 'worker:' .. w, 'device', 'first_block')
    if v[1] == 'gpu' then blocks[#blocks + 1] = 'block_' .. v[2] end
  end
  return table.concat(blocks, ',')
end

-- Ends the current run, queues the request again and returns the fallback events that it added.
-- `failure` is a GPU's, or nil: {block (where it failed), stage (nil: the first), reason and code (for its fallback events;
-- nil: as `reason`, not known), lost (function: whether another worker of its process failed too)}. The next route has a CPU
-- for each stage that failed and does not wait for a worker of the numerics id; a request that denies fallbacks waits for GPUs
-- for all stages that had one, and one that limits the slowdown ends where a CPU is predicted to be slower.
-- `found`: leading tokens that have KV pages in the stage that lacked some, or that left its GPU (nil: not known); until it has
-- a new token the next run reuses no more of them in any stage.
-- `tried`: the request that a dead worker ran alone, or nil; with it no other request is to blame.
-- Re-runs and deaths count only at an unchanged log length; the second re-run is delayed, and each later one twice as long.
-- Keeps I3, I7, I16.
local function rerun(r, reason, failure, tried, found)
  local set = {'state', 'queued', 'run', '', 'route', '', 'progress_ms', NOW, 'rerun_reason', reason}
  if reason == 'missing_pages' then
    set[#set + 1] = 'missing_pages'; set[#set + 1] = r.missing_pages + 1
  end
  local nearer = found and (r.reusable == '' or found < tonumber(r.reusable))
  if nearer then
    set[#set + 1] = 'reusable'; set[#set + 1] = found
  end
  if r.deaths_at ~= r.committed then r.deaths, r.quarantine_deaths, r.attempts = 0, 0, 0 end
  local blameless = reason == 'drain' or reason == 'preempted' or nearer or (reason == 'death' and tried and tried ~= r.id)
  if reason == 'death' and not blameless then
    r.deaths = r.deaths + 1
    if tried then r.quarantine_deaths = r.quarantine_deaths + 1 end
    if r.quarantine_deaths >= MAX_QUARANTINE_DEATHS then
      local message = 'the request ended its worker ' .. r.deaths .. ' times at the same position and is kept as a dead letter'
      dead_letter(r, 'poison', message)
      finish(r, 'error', cjson.encode({error = message, code = 'poison'}))
      return {}
    end
  end
  if not blameless then r.attempts = r.attempts + 1 end
  for _, f in ipairs({'deaths', 'quarantine_deaths', 'attempts'}) do set[#set + 1] = f; set[#set + 1] = r[f] end
  set[#set + 1] = 'deaths_at'; set[#set + 1] = r.committed
  local stages = failure and fallen(r, failure) or {}
  local predicted = failure and predicted_slowdowns(r.model) or {}
  local refused = too_slow(r, stages, predicted)
  if refused then
    timeline_event(r.id, 'd' .. refused[1])
    finish(r, 'error', cjson.encode({error = refused[2], code = 'fallback_too_slow', failed_block = refused[1]}))
    return {}
  end
  if r.steps > 0 then
    local on_gpus, on_cpus = executed(r)
    for _, v in ipairs({'steps', 0, 'gpu_executed', on_gpus, 'cpu_executed', on_cpus}) do set[#set + 1] = v end
  end
  release(r, true)
  account(r, -1)
  r.state, r.rows_to_compute = 'queued', r.prompt_tokens + r.committed
  set[#set + 1] = 'rows_to_compute'; set[#set + 1] = r.rows_to_compute
  account(r, 1)
  local denied, events = failure and r.fallback == 'deny', {}
  if denied then
    local since = r.denied_ms > 0 and r.denied_ms or NOW
    for _, v in ipairs({'denied_block', gpus_of(r.route, failure.block), 'denied_ms', since}) do set[#set + 1] = v end
  elseif failure then
    events = add_fallbacks(r, stages, failure.reason or reason, failure.code, predicted)
    for _, one in ipairs(stages) do
      if one.stage == 1 then r.class = 'cpu' end
    end
    for _, v in ipairs({'class', r.class, 'fallbacks', r.fallbacks}) do set[#set + 1] = v end
  end
  redis.call('HSET', P .. 'request:' .. r.id, unpack(set))
  redis.call('HINCRBY', P .. 'request:' .. r.id, 'reruns', 1)
  redis.call('HINCRBY', P .. 'totals:' .. r.model, 'reruns:' .. reason, 1)
  local waits = pinned(r) and not failure
  timeline_event(r.id, 'r' .. reason .. '@' .. r.committed .. (waits and '=' .. id_of(r.numerics) or ''))
  if denied then timeline_event(r.id, 'd' .. failure.block) end
  for _, event in ipairs(events) do
    timeline_event(r.id, 'f' .. event.block_id)
    timeline_event(r.id, string.format('w%d-%d,%s,%s', event.blocks[1], event.blocks[2], event.reason, event.error_code or ''))
  end
  redis.call('ZADD', P .. 'running', 'XX', NOW, r.id)
  if r.attempts > 1 and not blameless then
    enqueue_later(r, math.min(LONGEST_DELAY, FIRST_DELAY * 2 ^ (r.attempts - 2)))
  elseif waits then
    pin(r)
  else
    enqueue(r)
  end
  return events
end
