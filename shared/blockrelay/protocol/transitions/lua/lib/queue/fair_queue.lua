-- The queue of first runs, fair between tenants: a zset request -> rank, lowest first. A rank combines a priority and a
-- start tag of start-time fair queueing. A tenant's next tag is its last tag plus that request's tokens / weight, but at
-- least the virtual time (the tag claimed last), so that no tenant saves up idle time.
-- `shares:<model>:<class>` has, as ranks, 'v <priority>' with the virtual time and 't <priority> <weight> <tenant>' with the
-- tenant's next tag; tags below the virtual time are dropped.
-- Keeps I11.
-- Distance between the ranks of two priorities.
local BAND = 2 ^ 44
-- Milliseconds before its latest start from which a request with a deadline is claimed before its rank.
local URGENT = 1000
local MOST_SHARES = 512

local function rank_of(priority, tag) return (priority + 128) * BAND + tag end
local function exact(number) return string.format('%.0f', number) end

-- Returns the rank that a request of the tenant gets now, and the name of the tenant's member in `shares`.
local function next_rank(shares, priority, weight, tenant)
  local share = string.format('t %d %s %s', priority, weight, tenant)
  local now = tonumber(redis.call('ZSCORE', shares, 'v ' .. priority) or rank_of(priority, 0))
  return math.max(now, tonumber(redis.call('ZSCORE', shares, share) or 0)), share
end

-- Puts a first run into the queue. `cost`: its tokens (prompt and max_tokens). `due`: its latest start (ms), or nil.
local function queue_up(r, priority, weight, tenant, cost, due)
  local where = r.model .. ':' .. r.class
  local queue, shares = P .. 'queue:' .. where, P .. 'shares:' .. where
  if redis.call('EXISTS', queue) == 0 then redis.call('DEL', shares) end
  local rank, share = next_rank(shares, priority, weight, tenant)
  cost = math.max(1, math.ceil(cost / weight))
  redis.call('ZADD', queue, exact(rank), r.id)
  redis.call('ZADD', shares, exact(rank + cost), share)
  if due then redis.call('ZADD', P .. 'due:' .. where, exact(due), r.id) end
  redis.call('HSET', P .. 'request:' .. r.id, 'job', 'queue', 'share', exact(cost) .. ' ' .. share)
  redis.call('XADD', P .. 'jobs:' .. where, 'MAXLEN', 1, '*', 'request', r.id)
end

-- Returns an upper bound of the tokens (prompt and max_tokens) claimed before a request of this rank; nil if unknown.
local function tokens_before(shares, rank)
  local priority = math.floor(rank / BAND) - 128
  local all = redis.call('ZRANGEBYSCORE', shares, '-inf', '(' .. exact(rank_of(priority + 1, 0)), 'WITHSCORES', 'LIMIT', 0,
    MOST_SHARES)
  if #all >= 2 * MOST_SHARES then return nil end
  local now, tags, sum = {}, {}, 0
  for i = 1, #all, 2 do
    local kind, band, weight = string.match(all[i], '^(%a) (%S+) ?(%S*)')
    if kind == 'v' then now[band] = tonumber(all[i + 1])
    else tags[#tags + 1] = {band, tonumber(weight), tonumber(all[i + 1])} end
  end
  for _, t in ipairs(tags) do
    local from = now[t[1]] or rank_of(tonumber(t[1]), 0)
    sum = sum + math.max(0, math.min(t[3], rank) - from) * t[2]
  end
  return sum
end

-- Moves the virtual time to the rank that was claimed, and drops tags below it.
local function advance(where, rank)
  local shares, priority = P .. 'shares:' .. where, math.floor(rank / BAND) - 128
  redis.call('ZADD', shares, 'GT', exact(rank), 'v ' .. priority)
  redis.call('ZREMRANGEBYSCORE', shares, exact(rank_of(priority, 0)), '(' .. exact(rank))
end
