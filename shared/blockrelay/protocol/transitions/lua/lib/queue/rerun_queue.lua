-- The queues of re-runs: for any worker, for workers of one numerics id, or delayed.
-- needs: requests/record

-- Milliseconds that the second re-run at one log length is delayed, and that a later one is delayed at most.
local FIRST_DELAY, LONGEST_DELAY = 100, 5000

local function reruns_stream(r) return P .. 'reruns:' .. r.model .. ':' .. r.class end
local function pinned_stream(r) return P .. 'pinned:' .. r.model .. ':' .. r.class .. ':' .. id_of(r.numerics) end

local function unqueue(r)
  if r.job == 'delayed' then
    redis.call('ZREM', P .. 'delayed', r.id)
  elseif r.job == 'queue' then
    redis.call('ZREM', P .. 'queue:' .. r.model .. ':' .. r.class, r.id)
    redis.call('ZREM', P .. 'due:' .. r.model .. ':' .. r.class, r.id)
  elseif r.job ~= '' then
    local stream, entry = string.match(r.job, '^(%a+) (.+)$')
    redis.call('XDEL', stream == 'pinned' and pinned_stream(r) or reruns_stream(r), entry)
  end
end

-- Queues a re-run for any worker.
local function enqueue(r)
  local entry = redis.call('XADD', reruns_stream(r), '*', 'request', r.id)
  redis.call('HSET', P .. 'request:' .. r.id, 'job', 'reruns ' .. entry)
end

-- Queues a re-run for workers of the numerics id that computed its tokens: in a stream of its own, where it holds up no other
-- request. MIGRATE checks whether such a worker is left.
local function pin(r)
  local entry = redis.call('XADD', pinned_stream(r), '*', 'request', r.id)
  redis.call('HSET', P .. 'request:' .. r.id, 'job', 'pinned ' .. entry)
  redis.call('HSETNX', P .. 'numerics:' .. r.model, r.class .. ':' .. id_of(r.numerics), '')
end

local function enqueue_later(r, delay)
  redis.call('ZADD', P .. 'delayed', NOW + delay, r.id)
  redis.call('HSET', P .. 'request:' .. r.id, 'job', 'delayed')
end

-- Queues re-runs whose delay is over; also those due later than the longest delay, since the clock was set back.
local function promote()
  for _, range in ipairs({{'-inf', NOW}, {'(' .. (NOW + LONGEST_DELAY), '+inf'}}) do
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'delayed', range[1], range[2], 'LIMIT', 0, 64)) do
      redis.call('ZREM', P .. 'delayed', id)
      local r = read_record(id)
      if r and r.state == 'queued' and r.job == 'delayed' then
        if pinned(r) then pin(r) else enqueue(r) end
      end
    end
  end
end
