-- KV pages that a run has reserved on the workers of its route.
-- needs: requests/record

-- Gives back what a run has reserved, and tells the workers (a hint: BEAT finds runs whose message was lost). Idempotent,
-- since only a member of worker-requests:<worker> has a reservation.
-- Keeps I4.
local function release(r)
  for _, w in ipairs(members(r.route)) do
    redis.call('XADD', P .. 'inbox:' .. w, 'NOMKSTREAM', '*', 'ended', cmsgpack.pack({r.id, r.run}))
    if redis.call('SREM', P .. 'worker-requests:' .. w, r.id) == 1 and r.pages_reserved > 0
      and redis.call('EXISTS', P .. 'worker:' .. w) == 1 then
      redis.call('HINCRBY', P .. 'worker:' .. w, 'pages_reserved', -r.pages_reserved)
    end
    if redis.call('GET', P .. 'quarantine:' .. w) == r.id then redis.call('DEL', P .. 'quarantine:' .. w) end
  end
end
