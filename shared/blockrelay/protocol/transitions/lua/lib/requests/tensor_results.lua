-- What tensor results take of the payload Redis.

-- The books of tensor results (I6), which lie on the payload Redis: `results` says until when each may be there, and
-- `result-bytes` how large it is and whose, with the sums: of all under '', of a tenant under ' ' and its name.
local function add_result(tenant, bytes)
  for _, sum in ipairs({'', ' ' .. tenant}) do
    if redis.call('HINCRBY', P .. 'result-bytes', sum, bytes) == 0 then redis.call('HDEL', P .. 'result-bytes', sum) end
  end
end

local function strike_result(id)
  local bytes, tenant = string.match(redis.call('HGET', P .. 'result-bytes', id) or '', '^(%d+) (.*)$')
  if bytes then
    add_result(tenant, -bytes)
    redis.call('HDEL', P .. 'result-bytes', id)
  end
  redis.call('ZREM', P .. 'results', id)
end

-- Promised. A promise under the same id is of a request that is begun anew.
local function book_result(id, tenant, bytes)
  strike_result(id)
  redis.call('ZADD', P .. 'results', '+inf', id)
  redis.call('HSET', P .. 'result-bytes', id, bytes .. ' ' .. tenant)
  add_result(tenant, bytes)
end

-- Its request has ended. What a worker has begun, one may store; nobody will store what nobody has claimed.
local function end_result(id, claimed)
  if claimed then redis.call('ZADD', P .. 'results', 'XX', NOW + RESULT_MS, id) else strike_result(id) end
end
