-- KV pages that a run of several stages has reserved on each worker of its route: those of its prompt, its tokens, the next one
-- and the drafts behind it. A worker of the whole model reserves none.
-- needs: requests/record

-- Returns the pages of the tokens that a request has, of the next one and of `ahead` more.
local function pages_of(r, ahead) return math.ceil((r.prompt_tokens + r.committed + 1 + ahead) / PAGE_TOKENS) end

-- Returns how many pages a request reserves at its present length, of which it needs `r.pages_needed` at most.
local function pages_now(r) return math.min(r.pages_needed, pages_of(r, MAX_DRAFTS)) end

-- Returns the log length at which a run that has reserved `reserved` pages reserves more; 0: it has all.
local function grow_at(r, reserved)
  return reserved < r.pages_needed and reserved * PAGE_TOKENS - MAX_DRAFTS - r.prompt_tokens or 0
end

-- Returns the pages of a worker that nobody has reserved; nil if it is not registered.
local function unreserved(w)
  local v = redis.call('HMGET', P .. 'worker:' .. w, 'pages', 'pages_reserved')
  return v[1] and tonumber(v[1]) - tonumber(v[2] or '0')
end

-- The ids of the requests on a worker, the one that was accepted last first. Kept for the call: requests only leave meanwhile.
local by_age = {}
local function last_first(w)
  if not by_age[w] then
    local accepted, ids = {}, redis.call('SMEMBERS', P .. 'worker-requests:' .. w)
    for _, id in ipairs(ids) do accepted[id] = tonumber(redis.call('HGET', P .. 'request:' .. id, 'accepted_ms') or '0') end
    table.sort(ids, function(a, b) return accepted[a] > accepted[b] or (accepted[a] == accepted[b] and a > b) end)
    by_age[w] = ids
  end
  return by_age[w]
end

-- Returns the requests on `w` that were accepted after `r` and have to give way so that `lacking` pages are free; nil if these
-- have too few.
local function younger(w, r, lacking)
  local found = {}
  for _, id in ipairs(last_first(w)) do
    if lacking <= 0 then return found end
    if id == r.id then return nil end
    local v = redis.call('HMGET', P .. 'request:' .. id, 'state', 'route', 'pages_reserved')
    if v[1] == 'running' and string.find(',' .. v[2] .. ',', ',' .. w .. ',', 1, true) then
      found[#found + 1] = id
      lacking = lacking - tonumber(v[3])
    end
  end
  return lacking <= 0 and found or nil
end

-- Reserves more pages for a run whose log has grown. Where a worker of its route has too few, requests that were accepted after
-- it give way, the last one first: `give_way(id)` ends the run and queues the request again. If these have too few pages, no
-- other gives way but this one; then the answer is false.
-- The request that was accepted first keeps its pages, and CLAIM chose pools that hold each request alone, so it ends, and then
-- the next one does.
-- Keeps I4.
local function grow(r, give_way)
  local more, route, leaving, listed = pages_now(r) - r.pages_reserved, members(r.route), {}, {}
  if more <= 0 then return true end
  for _, w in ipairs(route) do
    local found = younger(w, r, more - (unreserved(w) or more))
    if not found then
      give_way(r.id)
      return false
    end
    for _, id in ipairs(found) do
      if not listed[id] then leaving[#leaving + 1] = id end
      listed[id] = true
    end
  end
  for _, id in ipairs(leaving) do give_way(id) end
  for _, w in ipairs(route) do
    if redis.call('SISMEMBER', P .. 'worker-requests:' .. w, r.id) == 1 and unreserved(w) then
      redis.call('HINCRBY', P .. 'worker:' .. w, 'pages_reserved', more)
    end
  end
  r.pages_reserved = r.pages_reserved + more
  redis.call('HSET', P .. 'request:' .. r.id, 'pages_reserved', r.pages_reserved, 'grow_at', grow_at(r, r.pages_reserved))
  return true
end

-- Gives back what a run has reserved, and tells the workers (a hint: BEAT finds runs whose message was lost), also whether the
-- request runs `again`: then the page store holds its pages. Idempotent, since only a member of worker-requests:<worker> has a
-- reservation.
-- Keeps I4.
local function release(r, again)
  for _, w in ipairs(members(r.route)) do
    local ended = cmsgpack.pack({r.id, r.run})
    redis.call('XADD', P .. 'inbox:' .. w, 'NOMKSTREAM', '*', 'ended', ended, 'again', again and 1 or 0)
    if redis.call('SREM', P .. 'worker-requests:' .. w, r.id) == 1 and r.pages_reserved > 0
      and redis.call('EXISTS', P .. 'worker:' .. w) == 1 then
      redis.call('HINCRBY', P .. 'worker:' .. w, 'pages_reserved', -r.pages_reserved)
    end
    if redis.call('GET', P .. 'quarantine:' .. w) == r.id then redis.call('DEL', P .. 'quarantine:' .. w) end
  end
end
