-- Routes of one worker of the first stage: who could follow it, one worker for every stage.
-- needs: workers/fleet

-- The worker that claims, at the front of every route: id, model, split, device, numerics, pages (of its pool), free (of
-- those, not reserved), running (requests that it runs), and `stages` of its split.
local me

-- False when this worker may not claim: it is unknown, of a later stage, draining, without an inbox or without a beat.
local function claims(worker)
  local v = redis.call('HMGET', P .. 'worker:' .. worker, 'model', 'split', 'stage', 'device', 'numerics', 'pages', 'pages_reserved',
    'draining')
  if not v[1] or v[3] ~= '0' or redis.call('EXISTS', P .. 'inbox:' .. worker) == 0 then return false end
  if v[8] or not is_alive(redis.call('ZSCORE', P .. 'workers', worker)) then return false end
  local _, commas = string.gsub(v[2], ',', '')
  me = {id = worker, model = v[1], split = v[2], device = v[4], numerics = v[5], pages = tonumber(v[6]),
    free = tonumber(v[6]) - tonumber(v[7] or '0'), running = 0, stages = commas + 1}
  return true
end

-- Of the workers of a stage and device so many at most are looked at: any of them will do, the least loaded of some is good.
local SAMPLE = 16

-- Ids of the workers of my split and numerics: roster[stage + 1][device], sorted.
local function roster()
  return kept(me.model, me.split .. ' ' .. me.numerics, function()
    local found, all = {}, registered()
    for s = 1, me.stages do found[s] = {gpu = {}, cpu = {}} end
    for i = 1, #all, 2 do
      local v = redis.call('HMGET', P .. 'worker:' .. all[i], 'model', 'split', 'numerics', 'stage', 'device')
      if v[1] == me.model and v[2] == me.split and v[3] == me.numerics then
        table.insert(found[tonumber(v[4]) + 1][v[5]], all[i])
      end
    end
    for s = 1, me.stages do
      table.sort(found[s].gpu)
      table.sort(found[s].cpu)
    end
    return found
  end)
end

-- Those of them that live, are ready and do not drain: list of {id, pages, free, running}. `chance`: hex digits.
local function live(ids, chance)
  local found = {}
  local first = #ids > SAMPLE and tonumber(string.sub(chance, 1, 8), 16) or 0
  for i = 1, math.min(#ids, SAMPLE) do
    local w = ids[(first + i) % #ids + 1]
    local v = redis.call('HMGET', P .. 'worker:' .. w, 'pages', 'pages_reserved', 'draining')
    if v[1] and not v[3] and is_alive(redis.call('ZSCORE', P .. 'workers', w))
      and redis.call('EXISTS', P .. 'inbox:' .. w) == 1 then
      found[#found + 1] = {id = w, pages = tonumber(v[1]), free = tonumber(v[1]) - tonumber(v[2] or '0'),
        running = redis.call('SCARD', P .. 'worker-requests:' .. w)}
    end
  end
  return found
end

-- Who could follow me in a route: candidates[stage][device], from stage 1 on. Asked only when there is something to claim.
local candidates
-- Whether every stage has somebody.
local function staffed(chance)
  if not candidates then
    candidates = {}
    local known = me.stages > 1 and roster()
    for s = 1, me.stages - 1 do
      candidates[s] = {gpu = live(known[s + 1].gpu, chance), cpu = live(known[s + 1].cpu, chance)}
    end
  end
  for s = 1, me.stages - 1 do
    if #candidates[s].cpu + #candidates[s].gpu == 0 then return false end
  end
  return true
end

local function least_loaded(list, need)
  local best
  for _, c in ipairs(list) do
    if c.free >= need and (not best or c.running < best.running or (c.running == best.running and c.id < best.id)) then best = c end
  end
  return best
end

-- A member for every stage, me at the front; nil when some stage has no room or no worker of an allowed device.
local function find_route(need, class)
  if me.free < need then return nil end
  local route = {me}
  for s = 1, me.stages - 1 do
    local chosen = class == 'gpu' and least_loaded(candidates[s].gpu, need) or nil
    if not chosen and (class == 'cpu' or #candidates[s].gpu == 0) then chosen = least_loaded(candidates[s].cpu, need) end
    if not chosen then return nil end
    route[#route + 1] = chosen
  end
  return route
end

-- Whether some stage has nobody whose pool would hold so many pages even empty: then a job waits for another worker to
-- come, and nobody waits behind it.
local function fits_nowhere(need)
  for s = 0, me.stages - 1 do
    local most = s == 0 and me.pages or 0
    for _, list in pairs(s == 0 and {} or candidates[s]) do
      for _, c in ipairs(list) do most = math.max(most, c.pages) end
    end
    if most < need then return true end
  end
  return false
end

-- A CPU worker takes GPU-class jobs only where stage 0 has no live GPU worker; a GPU worker never takes CPU jobs.
local function classes() return me.device == 'gpu' and {'gpu'} or {'cpu', 'gpu'} end
local function takes(class, chance) return class == me.device or #live(roster()[1].gpu, chance) == 0 end
