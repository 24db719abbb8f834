-- The registry as ACCEPT and CLAIM see it. Reading it takes a command or more for each worker, so what they make of it is
-- kept for a second in `fleet:<model>`; a worker that comes (it announces itself) or goes (DEAD) drops it.
local KEPT = 1000
local function kept(model, what, make)
  local key = P .. 'fleet:' .. model
  local packed = redis.call('HGET', key, what)
  if packed then return cmsgpack.unpack(packed) end
  local made = make()
  redis.call('HSET', key, what, cmsgpack.pack(made))
  if redis.call('PTTL', key) < 0 then redis.call('PEXPIRE', key, KEPT) end
  return made
end

-- All registered workers, with their beats: {id, ms, id, ms, …}. Nobody registers beyond MAX_WORKERS.
local function registered()
  return redis.call('ZRANGEBYSCORE', P .. 'workers', '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, MAX_WORKERS)
end

-- A worker lives while its last beat is not `dead_after()` ms old; one that lies as far in the future is from before the
-- clock was put back.
local function is_alive(beat)
  return beat and math.abs(NOW - tonumber(beat)) < dead_after()
end
