-- Forecasts when a request that arrives now would have its first token, and its end.
-- needs: workers/fleet

-- The forecast is built from the workers' own measurements and errs towards late: tokens in the prefix cache and answers that
-- stop early count in full, and each batch is as large as the largest of late.
-- A request needs QUEUE_MARGIN times its wait (a flood slows down what it waits for), RUN_MARGIN times its run and SPARE
-- seconds before its deadline. UNMEASURED: requests that may have a deadline while no worker has measured itself.
local QUEUE_MARGIN, RUN_MARGIN, SPARE, UNMEASURED = 2, 1.25, 0.3, 8

-- Returns the seconds between two tokens of a request in a batch of `batch` requests, on the slowest worker. `all`: for each
-- worker {recent concurrency, {requests, seconds}...}. Batches beyond the measured ones take longer in proportion.
local function slowest_step(all, batch)
  local slowest = 0
  for _, steps in ipairs(all) do
    local size, step = math.max(batch, steps[1]), nil
    for i = 2, #steps do
      if not step and steps[i][1] >= size then step = steps[i][2] end
    end
    local largest = steps[#steps]
    slowest = math.max(slowest, step or largest[2] * size / largest[1])
  end
  return slowest
end

-- Returns `slowest_step` for all batches as a small table: `sizes` {requests, seconds}, ascending, for each batch size that a
-- worker has measured; for larger batches `each` seconds per request, but at least `least` seconds.
local function step_table(all)
  local sizes, known, each, least = {}, {}, 0, 0
  for _, steps in ipairs(all) do
    for i = 2, #steps do known[steps[i][1]] = true end
    local largest = steps[#steps]
    each = math.max(each, largest[2] / largest[1])
    least = math.max(least, largest[2] / largest[1] * steps[1])
  end
  for size in pairs(known) do sizes[#sizes + 1] = size end
  table.sort(sizes)
  for i, size in ipairs(sizes) do sizes[i] = {size, slowest_step(all, size)} end
  return {sizes = sizes, each = each, least = least}
end

-- Returns the seconds between two tokens in a batch of `batch` requests, from a `survey`.
local function step_among(found, batch)
  for _, step in ipairs(found.steps.sizes) do
    if step[1] >= batch then return step[2] end
  end
  return math.max(found.steps.each * batch, found.steps.least)
end

-- Returns what the workers of a model can do.
-- Of all workers: `largest`, KV pages of the largest pool of each stage (also of silent workers: they may come back, and a
-- refusal for size is final); `steady`, true if there is a whole route of deterministic workers.
-- Of live workers that take new requests: `pages`, KV pages of the stage that has least; `workers` of the first stage and `slots`, the requests that
-- these run at once; `grammars`, a set of the ids of grammars that these read; `varies`, true if one is nondeterministic.
-- Of live workers that have measured themselves, also those that retire: `row` and `token`, seconds per prompt token and per generated token of all
-- together (nil if none has); `slowest`, seconds per prompt token of the slowest; `steps` for `step_among`.
local function survey(model)
  local found = {largest = {}, workers = 0, slots = 0, slowest = 0, grammars = {}}
  local pools, rows, tokens, measured, routes = {}, 0, 0, {}, {}
  local all = registered()
  for i = 1, #all, 2 do
    local v = redis.call('HMGET', P .. 'worker:' .. all[i], 'split', 'stage', 'pages', 'model', 'slots', 'row_us', 'step_us', 'recent_concurrency', 'varies', 'numerics', 'retires', 'grammar')
    if v[4] == model and v[3] then
      local stage, pages = v[1] .. '/' .. v[2], tonumber(v[3])
      found.largest[stage] = math.max(found.largest[stage] or 0, pages)
      if v[9] ~= '1' then
        local route = v[10] .. ' ' .. v[1]
        routes[route] = routes[route] or {}
        routes[route][v[2]] = true
      end
      if is_alive(all[i + 1]) then
        if not v[11] then
          pools[stage] = (pools[stage] or 0) + pages
          found.varies = found.varies or v[9] == '1'
        end
        if v[2] == '0' then
          if not v[11] then
            found.workers, found.slots = found.workers + 1, found.slots + tonumber(v[5] or '64')
            found.grammars[v[12] or ''] = true
          end
          if v[6] then
            local steps = {tonumber(v[8])}
            for batch, us in string.gmatch(v[7], '(%d+):(%d+)') do steps[#steps + 1] = {tonumber(batch), tonumber(us) / 1e6} end
            local largest = steps[#steps]
            rows, tokens = rows + 1e6 / tonumber(v[6]), tokens + largest[1] / largest[2]
            found.slowest = math.max(found.slowest, tonumber(v[6]) / 1e6)
            measured[#measured + 1] = steps
          end
        end
      end
    end
  end
  for route, stages in pairs(routes) do
    local _, commas = string.gsub(string.match(route, ' (.+)$'), ',', '')
    local whole = true
    for s = 0, commas do whole = whole and stages[string.format('%d', s)] end
    found.steady = found.steady or whole
  end
  for _, pages in pairs(pools) do found.pages = math.min(found.pages or pages, pages) end
  if tokens > 0 then found.row, found.token = 1 / rows, 1 / tokens end
  found.steps = step_table(measured)
  return found
end

-- Returns the seconds until a request is claimed, and the seconds from then until its first token and until its end.
-- `found`: of `survey`. `outstanding`: of the model. `need`: KV pages of the request and those checked with it. `prompt` and
-- `most`: its prompt tokens and max_tokens. `before`: tokens (prompt and max_tokens) claimed earlier (nil: all that wait).
local function forecast(found, outstanding, in_flight, need, prompt, most, before)
  local queued = outstanding.queued_rows * found.row + outstanding.queued_tokens * found.token
  local running = outstanding.running_rows * found.row + outstanding.running_tokens * found.token
  local waiting = outstanding.queued_rows + outstanding.queued_tokens
  local share = (before and waiting > 0) and math.min(1, before / waiting) or 1
  local fit = found.pages and math.floor(found.pages * (in_flight + 1) / (outstanding.pages + need)) or found.slots
  local slots = math.max(1, math.min(found.slots, fit))
  local wait = share * queued
  if in_flight < slots then
    wait = share * outstanding.queued_rows * found.row  -- claimed at once; requests before it decode beside it
  else
    wait = wait + running  -- claimed at the latest when all running requests have ended
  end
  -- Prompts of other requests lengthen the time between tokens, in proportion to their share of all work.
  local prompts = (outstanding.queued_rows + outstanding.running_rows + prompt) * found.row
  local tokens = (outstanding.queued_tokens + outstanding.running_tokens + most) * found.token
  local batch = math.min(slots, in_flight + 1) / math.max(1, found.workers)
  local step = step_among(found, batch)
  local first = outstanding.running_rows * found.row + prompt * found.slowest + step
  local stretch = tokens > 0 and (prompts + tokens) / tokens or 1
  return wait, first, first + math.max(0, most - 1) * step * stretch
end
