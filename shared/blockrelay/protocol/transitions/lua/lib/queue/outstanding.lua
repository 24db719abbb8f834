-- The work that the unfinished requests of a model still need, in `outstanding:<model>` (I6).

-- Its fields, for queued and running requests: tokens of prompts and logs to compute (`rows`), tokens that may be generated
-- (`tokens`), KV pages (`pages`, of both).
-- Adds (`sign` 1) or takes off (-1) what `r` needs in its present state, without its KV pages.
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
