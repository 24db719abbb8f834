-- The end of a request.
-- needs: workers/reservations, workers/slowdown, queue/outstanding, queue/rerun_queue, requests/ended, requests/tensor_results

-- Returns the microseconds of a step of blocks `first` to `last` on the CPU that has them in the route; nil if not known.
local function stand_in_us(r, first, last)
  for _, w in ipairs(members(r.route)) do
    local on_cpu = redis.call('HGET', P .. 'worker:' .. w, 'device') == 'cpu'
    local us = on_cpu and measured_us(w, first, last)
    if us then return us end
  end
end

-- Returns the fallback events of a request that ends now, as JSON, each with its `success`: whether the CPU computed the stage
-- that failed on the GPU. It did if a token was committed after the failure, or if the end is a good one. `position`: the
-- log's length at the failure; `rows`: known tokens that the next run computed again (absent: not known); `seen`: how many
-- times as long a step of the stage takes on the CPU as it took on the GPU (absent: not measured on both).
local function judged_fallbacks(r, reason)
  if r.fallbacks == '' then return '' end
  local good = reason == 'stop' or reason == 'length' or reason == 'tensor'
  local list = cjson.decode(r.fallbacks)
  for _, event in ipairs(list) do
    event.success = good or r.committed > (event.at or 0)
    event.position, event.at = event.at, nil
    local us = event.success and event.us and stand_in_us(r, event.blocks[1], event.blocks[2])
    event.seen, event.us = us and told_slowdown(us / event.us) or nil, nil
  end
  return cjson.encode(list)
end

-- Ends a request: writes the terminal entry, gives back what it holds and shrinks its record. `meta` is a JSON object (error,
-- execution times) or ''.
-- Keeps I2, I5, and the accounting: each accepted request has ended or is in `running`.
local function finish(r, reason, meta)
  local record = P .. 'request:' .. r.id
  release(r)
  unqueue(r)
  account(r, -1)
  redis.call('HINCRBY', P .. 'outstanding:' .. r.model, 'pages', 0 - r.pages_needed)  -- `-0` is not a number to Redis
  redis.call('HINCRBY', P .. 'totals:' .. r.model, 'ended:' .. reason, 1)
  redis.call('SREM', P .. 'tenant-requests:' .. r.tenant, r.id)
  local bucket, unused = P .. 'bucket:' .. r.tenant, r.max_tokens - r.committed  -- below 0: more tokens than were charged
  if r.job == 'queue' then  -- it never ran, so its tenant gets its share and its prompt back too
    local cost, share = string.match(r.share, '^(%d+) (.+)$')
    redis.call('ZADD', P .. 'shares:' .. r.model .. ':' .. r.class, 'XX', 'INCR', -cost, share)
    unused = unused + r.prompt_tokens
  end
  local since = unused ~= 0 and redis.call('HGET', bucket, 'since')
  -- Nothing comes back that was not charged to this bucket: the key had no limit then, or has had no request for minutes.
  if since and (unused < 0 or tonumber(since) <= tonumber(redis.call('HGET', record, 'accepted_ms'))) then
    redis.call('HINCRBYFLOAT', bucket, 'level', unused)
  end
  local on_gpus, on_cpus = executed(r)
  local terminal = {'executed', on_gpus + on_cpus > 0 and string.format('%d,%d', on_gpus, on_cpus) or '', 'end', reason,
    'meta', meta, 'fallbacks', judged_fallbacks(r, reason), 'numerics', r.numerics,
    'varies', r.private == 1 and '1' or ''}
  for i, value in ipairs(redis.call('HMGET', record, unpack(MOVING))) do
    terminal[#terminal + 1] = MOVING[i]; terminal[#terminal + 1] = value
  end
  local pieces = close_log(r, terminal)
  if r.result_bytes > 0 then end_result(r.id, redis.call('HEXISTS', record, 'claimed_ms') == 1) end
  local left = {'state', 'done', 'end', reason, 'progress_ms', NOW}
  local notes = redis.call('HGET', record, 'notes') or ''
  for i, value in ipairs(redis.call('HMGET', record, unpack(REMAINING))) do
    local name = REMAINING[i]
    if value and value ~= '' and not (NOTED[name] and string.find(notes, NOTED[name])) then
      left[#left + 1] = name; left[#left + 1] = value
    end
  end
  redis.call('DEL', record)
  redis.call('HSET', record, unpack(left))
  if pieces then redis.call('HSET', record, unpack(pieces)) end
  redis.call('ZREM', P .. 'running', r.id)
  local kept_s = retention_of(r)
  redis.call('EXPIRE', record, kept_s)
  list_ended(r)
  redis.call('EXPIRE', P .. 'log:' .. r.id, pieces and math.min(kept_s, LINGER) or kept_s)
  r.state = 'done'
end
