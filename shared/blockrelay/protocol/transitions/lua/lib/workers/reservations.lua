-- KV pages that a run of several stages has reserved on each worker of its route: those of its prompt, its tokens, the next one
-- and the drafts behind it. A worker of the whole model reserves none.
-- needs: requests/record

-- Returns how many pages a request reserves at its present length, of which it needs `r.pages_needed` at most.
local function pages_now(r)
  return math.min(r.pages_needed, math.ceil((r.prompt_tokens + r.committed + 1 + MAX_DRAFTS) / PAGE_TOKENS))
end

-- Returns the log length at which a run that has reserved `reserved` pages reserves more; 0: it has all.
local function grow_at(r, reserved)
  return reserved < r.pages_needed and reserved * PAGE_TOKENS - MAX_DRAFTS - r.prompt_tokens or 0
end

-- Returns the pages of a worker that nobody has reserved; nil if it is not registered.
local function unreserved(w)
  local v = redis.call('HMGET', P .. 'worker:' .. w, 'pages', 'pages_reserved')
  return v[1] and tonumber(v[1]) - tonumber(v[2] or '0')
end

-- Returns the id of the request on a worker that was accepted last.
local function youngest(w)
  local id, accepted = nil, -1
  for _, other in ipairs(redis.call('SMEMBERS', P .. 'worker-requests:' .. w)) do
    local ms = tonumber(redis.call('HGET', P .. 'request:' .. other, 'accepted_ms') or '0')
    if ms > accepted or (ms == accepted and other > id) then id, accepted = other, ms end
  end
  return id
end

-- Reserves more pages for a run whose log has grown. Where a worker of its route has too few, the request that was accepted
-- last there gives way: `give_way(id)` ends its run and queues it again. False if that is this one.
-- The request that was accepted first keeps its pages, and CLAIM chose pools that hold each request alone, so it ends, and then
-- the next one does.
-- Keeps I4.
local function grow(r, give_way)
  local more, route = pages_now(r) - r.pages_reserved, members(r.route)
  if more <= 0 then return true end
  for _, w in ipairs(route) do
    while (unreserved(w) or more) < more do
      local id = youngest(w) or r.id
      give_way(id)
      if id == r.id then return false end
    end
  end
  for _, w in ipairs(route) do
    if redis.call('SISMEMBER', P .. 'worker-requests:' .. w, r.id) == 1 and unreserved(w) then
      redis.call('HINCRBY', P .. 'worker:' .. w, 'pages_reserved', more)
    end
  end
  r.pages_reserved = r.pages_reserved + more
  redis.call('HSET', P .. 'request:' .. r.id, 'pages_reserved', r.pages_reserved, 'grow_at', grow_at(r, r.pages_reserved))
  return true
end

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
