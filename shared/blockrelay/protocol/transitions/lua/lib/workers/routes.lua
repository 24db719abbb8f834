-- Routes that begin with one worker of the first stage: one worker for each stage.
-- A worker `varies` if its device is nondeterministic (GPUs through ONNX Runtime). It may be in a route with any others;
-- deterministic workers share a route only under one numerics id. All serve one block folder: what stages of two folders hand
-- each other need not mean the same.
-- needs: workers/fleet

-- The worker that claims, the first of every route: id, model, folder (key of its block folder), split, device (gpu or cpu), device_id (its name), epoch (of the
-- plan that gave it its stage), numerics, varies, retires (it takes only requests that have tokens of its numerics id), grammar (id of the grammars that it reads; ''), pages (of its pool), free (pages not reserved), running (requests that it runs), and `stages` of its split, {first block, last block} of each.
local me

-- The name of a worker's device, or its kind (gpu or cpu) if it has none.
local function named(device_id, device) return device_id and device_id ~= '' and device_id or device end

-- Reads `me`. False when the worker may not claim: it is unknown, of a later stage, draining, without inbox or heartbeat.
local function claims(worker)
  local v = redis.call('HMGET', P .. 'worker:' .. worker, 'model', 'split', 'stage', 'device', 'numerics', 'pages', 'pages_reserved',
    'draining', 'varies', 'device_id', 'epoch', 'retires', 'folder', 'grammar')
  if not v[1] or v[3] ~= '0' or redis.call('EXISTS', P .. 'inbox:' .. worker) == 0 then return false end
  if v[8] or not is_alive(redis.call('ZSCORE', P .. 'workers', worker)) then return false end
  local stages = {}
  for first, last in string.gmatch(v[2], '(%d+)-(%d+)') do stages[#stages + 1] = {tonumber(first), tonumber(last)} end
  me = {id = worker, model = v[1], folder = v[13] or v[1], split = v[2], device = v[4], device_id = named(v[10], v[4]), epoch = v[11] or '0', numerics = v[5], varies = v[9] == '1', retires = v[12] ~= false, grammar = v[14] or '', pages = tonumber(v[6]),
    free = tonumber(v[6]) - tonumber(v[7] or '0'), running = redis.call('SCARD', P .. 'worker-requests:' .. worker), stages = stages}
  return true
end

-- Workers of a stage and device that are looked at, at most: the least loaded of a sample is good enough.
local SAMPLE = 16
-- The group of all nondeterministic workers, beside the groups by numerics id.
local VARIES = '~'

-- Returns the ids of the workers of this split and folder: [stage + 1][device][numerics id, or VARIES], sorted.
local function roster()
  return kept(me.model, 'split ' .. me.split .. ' ' .. me.folder, function()
    local found, all = {}, registered()
    for s = 1, #me.stages do found[s] = {gpu = {}, cpu = {}} end
    for i = 1, #all, 2 do
      local v = redis.call('HMGET', P .. 'worker:' .. all[i], 'model', 'split', 'numerics', 'stage', 'device', 'varies', 'folder')
      if v[1] == me.model and v[2] == me.split and (v[7] or v[1]) == me.folder then
        local groups, group = found[tonumber(v[4]) + 1][v[5]], v[6] == '1' and VARIES or v[3]
        groups[group] = groups[group] or {}
        table.insert(groups[group], all[i])
      end
    end
    for s = 1, #me.stages do
      for _, groups in pairs(found[s]) do
        for _, ids in pairs(groups) do table.sort(ids) end
      end
    end
    return found
  end)
end

-- Appends to `found`, or to a new list, those workers of `ids` that live, are ready and do not drain: {id, device, device_id,
-- epoch, numerics, varies, retires, grammar, pages, free, running}. `ids` may be nil. `chance`: hex digits that choose the sample.
local function live(ids, chance, found)
  found = found or {}
  ids = ids or {}
  local first = #ids > SAMPLE and tonumber(string.sub(chance, 1, 8), 16) or 0
  for i = 1, math.min(#ids, SAMPLE) do
    local w = ids[(first + i) % #ids + 1]
    local v = redis.call('HMGET', P .. 'worker:' .. w, 'pages', 'pages_reserved', 'draining', 'numerics', 'varies', 'device', 'device_id', 'epoch', 'retires', 'grammar')
    if v[1] and not v[3] and is_alive(redis.call('ZSCORE', P .. 'workers', w))
      and redis.call('EXISTS', P .. 'inbox:' .. w) == 1 then
      found[#found + 1] = {id = w, device = v[6], device_id = named(v[7], v[6]), epoch = v[8] or '0', numerics = v[4], varies = v[5] == '1', retires = v[9] ~= false, grammar = v[10] or '', pages = tonumber(v[1]),
        free = tonumber(v[1]) - tonumber(v[2] or '0'), running = redis.call('SCARD', P .. 'worker-requests:' .. w)}
    end
  end
  return found
end

-- Returns the numerics ids that deterministic workers of the later stages may have: this worker's, or any if it varies.
local function partners(known)
  if not me.varies then return {me.numerics} end
  local ids, there = {}, {}
  for s = 2, #me.stages do
    for _, groups in pairs(known[s]) do
      for group in pairs(groups) do
        if group ~= VARIES and not there[group] then
          there[group] = true
          ids[#ids + 1] = group
        end
      end
    end
  end
  table.sort(ids)
  if #ids == 0 then ids[1] = VARIES end
  return ids
end

-- Returns the workers for the later stages, [stage][device] from stage 1 on, where deterministic ones have the numerics id
-- `partner`; and whether each stage has one.
local function look_for(known, partner, chance)
  local found, all = {}, true
  for s = 1, #me.stages - 1 do
    found[s] = {}
    for _, device in ipairs({'gpu', 'cpu'}) do
      local groups = known[s + 1][device]
      found[s][device] = live(groups[VARIES], chance, partner ~= VARIES and live(groups[partner], chance) or {})
    end
    all = all and #found[s].gpu + #found[s].cpu > 0
  end
  return found, all
end

-- The result of `look_for` under the first partner with which each stage has a worker; read when there is work to claim.
local candidates, complete
-- Whether each stage has a live worker.
local function staffed(chance)
  if not candidates then
    local known = #me.stages > 1 and roster()
    for _, partner in ipairs(known and partners(known) or {VARIES}) do
      candidates, complete = look_for(known, partner, chance)
      if complete then break end
    end
  end
  return complete
end

-- Whether a worker has `need` free pages for a run, and a pool for the `most` that it may ever need. Beside other runs a page for
-- each of them stays free, and a hundredth of the pool, so that a run that has just begun is not the next one to give way.
local function has_room(c, need, most)
  local spare = c.free < c.pages and math.max(c.running, math.floor(c.pages / 100)) or 0
  return c.free - spare >= need and c.pages >= most
end

local function least_loaded(list, need, most)
  local best
  for _, c in ipairs(list) do
    if has_room(c, need, most) and (not best or c.running < best.running or (c.running == best.running and c.id < best.id)) then best = c end
  end
  return best
end

-- Returns the workers of `list` that do not have a mark, `varies` or `retires`.
local function without(mark, list)
  local found = {}
  for _, c in ipairs(list) do
    if not c[mark] then found[#found + 1] = c end
  end
  return found
end

-- Whether a worker reads grammars of this id; '' for a request without a grammar.
local function reads(c, grammar) return grammar == '' or c.grammar == grammar end
local function readers(grammar, list)
  local found = {}
  for _, c in ipairs(list) do
    if reads(c, grammar) then found[#found + 1] = c end
  end
  return found
end

-- Returns the workers that may compute stage `s` of a request: CPUs if one of its blocks failed on a GPU, else GPUs; those of
-- the other kind if there are none. With `pure` only deterministic ones. With `keeps`, for a request with tokens of this
-- worker's numerics id, also those that retire. Of the last stage those that read `grammar`. The second value: those of the other kind, if these are the first choice.
local function allowed(s, failed, pure, keeps, grammar)
  local gpu, cpu = candidates[s].gpu, candidates[s].cpu
  if s == #me.stages - 1 then gpu, cpu = readers(grammar, gpu), readers(grammar, cpu) end
  if pure then gpu, cpu = without('varies', gpu), without('varies', cpu) end
  if not keeps then gpu, cpu = without('retires', gpu), without('retires', cpu) end
  local first, second = gpu, cpu
  for _, block in ipairs(failed) do
    if me.stages[s + 1][1] <= block and block <= me.stages[s + 1][2] then first, second = cpu, gpu end
  end
  if #first > 0 then return first, second end
  return second, {}
end

-- Whether a live GPU could compute the stage of `block`.
local function has_gpu(block)
  for s = 0, #me.stages - 1 do
    if me.stages[s + 1][1] <= block and block <= me.stages[s + 1][2] then
      if s == 0 then return me.device == 'gpu' end
      return #candidates[s].gpu > 0
    end
  end
  return false
end

-- Returns a worker for each stage, `me` first; nil when a stage has no allowed worker that `has_room`. `failed`: numbers of the
-- blocks that failed on a GPU; `pure`, `keeps` and `grammar` are those of `allowed`. `spill(s, gpus, cpus)`, for a request that may spill:
-- the CPU on which it ends sooner, or nil.
local function find_route(need, most, failed, pure, keeps, grammar, spill)
  if not has_room(me, need, most) or (pure and me.varies) then return nil end
  local route = {me}
  for s = 1, #me.stages - 1 do
    local list, others = allowed(s, failed, pure, keeps, grammar)
    local chosen = spill and #others > 0 and list[1].device == 'gpu' and spill(s, list, others)
      or least_loaded(list, need, most)
    if not chosen then return nil end
    route[#route + 1] = chosen
  end
  return route
end

-- Whether a stage has no worker whose whole pool holds `most` pages, or with `pure` no deterministic one, or without `keeps`
-- none that stays, or the last one none that reads `grammar`. The job then
-- waits for another worker to register, and does not hold up the jobs behind it.
local function fits_nowhere(most, pure, keeps, grammar)
  if pure and me.varies then return true end
  for s = 0, #me.stages - 1 do
    local largest = s == 0 and me.pages or -1
    for _, list in pairs(s == 0 and {} or candidates[s]) do
      for _, c in ipairs(list) do
        if not (pure and c.varies) and (keeps or not c.retires) and (s < #me.stages - 1 or reads(c, grammar)) then largest = math.max(largest, c.pages) end
      end
    end
    if largest < most then return true end
  end
  return false
end

-- Returns the numerics ids of a route's workers, each once, in the order of their stages, and whether one varies.
local function numerics_of(route)
  local ids, there, varies = {}, {}, false
  for _, c in ipairs(route) do
    if not there[c.numerics] then
      there[c.numerics] = true
      ids[#ids + 1] = c.numerics
    end
    varies = varies or c.varies
  end
  return table.concat(ids, '/'), varies
end

-- Returns how many blocks a route has on GPUs and how many on CPUs.
local function placed(route)
  local blocks = {gpu = 0, cpu = 0}
  for s, c in ipairs(route) do blocks[c.device] = blocks[c.device] + me.stages[s][2] - me.stages[s][1] + 1 end
  return blocks
end

-- The class of a request is the device that is to compute its first stage. A worker of another device takes it only while no
-- worker of that class lives.
local function classes() return {me.device, me.device == 'gpu' and 'cpu' or 'gpu'} end
local function takes(class, chance)
  if class == me.device then return true end
  for _, ids in pairs(roster()[1][class]) do
    if #live(ids, chance) > 0 then return false end
  end
  return true
end
