-- Spills: a request that GPUs are to begin begins on a CPU where it is predicted to end sooner.
-- By decode steps, as `block_times` of workers or schedulers' predictions say them; with unknown figures nothing spills.
-- needs: requests/record, workers/slowdown, workers/routes

-- What schedulers predict for the stages of this split, read at most once per call.
local predictions
local function slowdown_of(s)
  predictions = predictions or predicted_slowdowns(me.model)
  return predictions[string.format('%d-%d', me.stages[s + 1][1], me.stages[s + 1][2])]
end

-- Whether a request may spill at all. It may not if its client asked for bits or devices of its own (`exact`, `deny`), if it has
-- begun, or if its prompt is longer than its answer may be: how much slower CPUs are at prompts is published nowhere.
local function may_spill(r)
  return r.committed == 0 and r.exact ~= '1' and r.fallback ~= 'deny' and r.fallbacks == '' and r.prompt_tokens <= r.max_tokens
end

-- Whether the limit of a request allows a CPU for stage `s` (from 0).
local function within_limit(r, s)
  local limit = string.match(r.fallback, '^max:(.+)$')
  if not limit then return true end
  local ratio = slowdown_of(s)
  return ratio and ratio <= tonumber(limit)
end

-- Returns the microseconds of a step of `c` beside `running` requests. A batch beyond the measured one takes longer in proportion.
local function step_beside(c, running) return c.us * math.max(1, (running + 1) / c.rows) end

-- Returns how many requests may wait for `gpus` before one that ends sooner on the CPU `cpu`; nil: none does, or it is not known.
-- Workers have us and rows (of their steps of late; nil: not known) and running; GPUs also full, true if they have no room.
-- A GPU without any request is always sooner: one that was slow once could never show otherwise.
-- A full GPU ends one of its requests each time that all have had as many steps as there are requests, for requests alike.
local function spills_behind(cpu, gpus)
  local open, full, rate = math.huge, math.huge, 0
  for _, g in ipairs(gpus) do
    if g.running == 0 or not g.us then return nil end
    if g.full then
      local step = step_beside(g, g.running - 1)
      full, rate = math.min(full, step), rate + g.running / step
    else
      open = math.min(open, step_beside(g, g.running))
    end
  end
  local here = cpu.us and step_beside(cpu, cpu.running)
  if not here or here >= open then return nil end
  return full < math.huge and math.max(0, math.floor((here - full) * rate)) or 0
end

-- Reads what workers of stage `s` have measured of late, once per call. A CPU that has not is as slow as is predicted.
local function measure(s, gpus, cpus)
  local quickest
  for _, list in ipairs({gpus, cpus}) do
    for _, c in ipairs(list) do
      if c.us == nil then
        local us, rows = measured_us(c.id, me.stages[s + 1][1], me.stages[s + 1][2])
        c.us, c.rows = us or false, rows
      end
    end
  end
  for _, g in ipairs(gpus) do
    if g.us and (not quickest or g.us < quickest.us) then quickest = g end
  end
  local ratio = quickest and slowdown_of(s)
  for _, c in ipairs(cpus) do
    if not c.us and ratio then c.us, c.rows = quickest.us * ratio, quickest.rows end
  end
end

-- Returns the CPU on which stage `s` of a request ends sooner than on any of the `gpus`, which are at least one; nil: on none.
local function sooner_on_cpu(s, gpus, cpus, need, most)
  local best
  measure(s, gpus, cpus)
  for _, g in ipairs(gpus) do g.full = not has_room(g, need, most) end
  for _, c in ipairs(cpus) do
    if has_room(c, need, most) and spills_behind(c, gpus) == 0
      and (not best or step_beside(c, c.running) < step_beside(best, best.running)) then best = c end
  end
  return best
end

-- Returns the live GPUs that could begin requests of this worker's split and do not retire; full are those whose slots or pages are taken.
local function first_gpus(chance)
  local found = {}
  for _, ids in pairs(roster()[1].gpu) do live(ids, chance, found) end
  found = without('retires', found)
  for _, g in ipairs(found) do
    local v = redis.call('HMGET', P .. 'worker:' .. g.id, 'slots', 'pages_used')
    g.free = math.min(g.free, g.pages - tonumber(v[2] or '0'))
    g.full = g.running >= tonumber(v[1] or '64') or not has_room(g, 1, 0)
  end
  return found
end
