-- The registry of workers, as ACCEPT and CLAIM see it. Reading it takes several commands per worker, so what they compute from
-- it is cached for a second in `fleet:<model>`. A worker that registers, and DEAD, delete the cache.
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

-- Returns all registered workers with the time of their last heartbeat: {id, ms, id, ms, …}; at most MAX_WORKERS.
local function registered()
  return redis.call('ZRANGEBYSCORE', P .. 'workers', '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, MAX_WORKERS)
end

-- Whether a worker with this last heartbeat is alive: it is less than `dead_after()` ms old. A heartbeat as far in the future
-- is from before the clock was set back, and does not count.
local function is_alive(beat)
  return beat and math.abs(NOW - tonumber(beat)) < dead_after()
end
