-- Accounting of tensor results, which are on the payload Redis.

-- `results` has the time until which each result may be stored. `result-bytes` has its size and tenant, and the sums: of all
-- under '', of a tenant under ' ' and its name (I6).
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

-- Accounts for the result of a request that is accepted. An entry of the same id is replaced: the request starts again.
local function book_result(id, tenant, bytes)
  strike_result(id)
  redis.call('ZADD', P .. 'results', '+inf', id)
  redis.call('HSET', P .. 'result-bytes', id, bytes .. ' ' .. tenant)
  add_result(tenant, bytes)
end

-- Updates the accounting when the request has ended. A claimed request's worker may still store its result for a while; of a
-- request that was never claimed there will be none.
local function end_result(id, claimed)
  if claimed then redis.call('ZADD', P .. 'results', 'XX', NOW + RESULT_MS, id) else strike_result(id) end
end
