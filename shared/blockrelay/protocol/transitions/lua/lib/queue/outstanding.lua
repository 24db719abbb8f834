-- What the unfinished requests of a model still cost.

-- `outstanding:<model>` (I6): what its unfinished requests still cost, queued and running: prompt rows (and rows of
-- committed tokens) that nobody has computed, tokens that may follow, KV pages.
-- `sign` 1 adds what r weighs in its present state, -1 takes it away.
local function account(r, sign)
  local key, left = P .. 'outstanding:' .. r.model, r.max_tokens - r.committed
  if r.rows_to_compute > 0 then redis.call('HINCRBY', key, r.state .. '_rows', sign * r.rows_to_compute) end
  if left > 0 then redis.call('HINCRBY', key, r.state .. '_tokens', sign * left) end
end

local function outstanding_of(model)
  local v = redis.call('HMGET', P .. 'outstanding:' .. model, 'queued_rows', 'queued_tokens', 'running_rows', 'running_tokens', 'pages')
  return {queued_rows = tonumber(v[1] or 0), queued_tokens = tonumber(v[2] or 0), running_rows = tonumber(v[3] or 0),
    running_tokens = tonumber(v[4] or 0), pages = tonumber(v[5] or 0)}
end
