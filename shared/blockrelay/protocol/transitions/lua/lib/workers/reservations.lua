-- What a run holds on the workers of its route.
-- needs: requests/record

-- Give back what a run holds on its route's workers and tell them (a hint: BEAT finds what a lost note leaves behind).
-- Keeps I4.
-- Idempotent: only a member of on:<worker> has a reservation.
local function release(r)
  for _, w in ipairs(members(r.route)) do
    redis.call('XADD', P .. 'inbox:' .. w, 'NOMKSTREAM', '*', 'd', cmsgpack.pack({r.id, r.run}))
    if redis.call('SREM', P .. 'on:' .. w, r.id) == 1 and r.held > 0
      and redis.call('EXISTS', P .. 'worker:' .. w) == 1 then
      redis.call('HINCRBY', P .. 'worker:' .. w, 'reserved', -r.held)
    end
    if redis.call('GET', P .. 'trying:' .. w) == r.id then redis.call('DEL', P .. 'trying:' .. w) end
  end
end
