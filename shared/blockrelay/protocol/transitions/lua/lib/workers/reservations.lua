-- What a run holds on the workers of its route.
-- needs: requests/record

-- Give back what a run holds on its route's workers and tell them (a hint: BEAT finds what a lost note leaves behind).
-- Keeps I4.
-- Idempotent: only a member of worker-requests:<worker> has a reservation.
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
