-- What the workers say of themselves, and what follows for a request that comes now. All of it errs towards late: rows
-- that a page cache has and answers that stop early count in full, and every batch is taken to be a full one.
local SILENT = 5000  -- milliseconds without a beat until a worker no longer counts
-- Before its deadline a request must have time for QUEUE_MARGIN times its wait (a flood slows down what it waits for),
-- RUN_MARGIN times its run and SPARE seconds. While nobody has measured anything, so many requests may have a deadline.
local QUEUE_MARGIN, RUN_MARGIN, SPARE, UNMEASURED = 2, 1.25, 0.3, 8

-- Of a model: `largest` pool of each stage, `pages` of the narrowest stage, `workers` of the first stage and the requests
-- (`slots`) that they run at once; of those that have measured themselves, together: seconds for a prompt row and for a
-- token (`row`, `token`, nil before), and the slowest one's `step` between two tokens of a request among `batch` others.
local function survey(model)
  local found = {largest = {}, workers = 0, slots = 0, slowest = 0, step = 0, batch = 1}
  local pools, rows, tokens = {}, 0, 0
  local all = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 256)
  for i = 1, #all, 2 do
    local v = redis.call('HMGET', P .. 'worker:' .. all[i], 'split', 'stage', 'pages', 'model', 'slots', 'row_us', 'step_us', 'batch')
    if v[4] == model and v[3] then
      local stage, pages = v[1] .. '/' .. v[2], tonumber(v[3])
      found.largest[stage] = math.max(found.largest[stage] or 0, pages)
      if NOW - tonumber(all[i + 1]) < SILENT then
        pools[stage] = (pools[stage] or 0) + pages
        if v[2] == '0' then
          found.workers, found.slots = found.workers + 1, found.slots + tonumber(v[5] or '64')
          if v[6] then
            local step, batch = tonumber(v[7]) / 1e6, tonumber(v[8])
            rows, tokens = rows + 1e6 / tonumber(v[6]), tokens + batch / step
            found.slowest = math.max(found.slowest, tonumber(v[6]) / 1e6)
            if step / batch > found.step / found.batch then found.step, found.batch = step, batch end
          end
        end
      end
    end
  end
  for _, pages in pairs(pools) do found.pages = math.min(found.pages or pages, pages) end
  if tokens > 0 then found.row, found.token = 1 / rows, 1 / tokens end
  return found
end

-- Seconds until a request is claimed, and seconds from then until its first token and its end.
-- `load` is the model's books, `before` the tokens (prompt and max_tokens) that are claimed earlier (nil: all that wait).
local function forecast(found, load, in_flight, need, prompt, most, before)
  local queued = load.queued_rows * found.row + load.queued_tokens * found.token
  local running = load.running_rows * found.row + load.running_tokens * found.token
  local waiting = load.queued_rows + load.queued_tokens
  local share = (before and waiting > 0) and math.min(1, before / waiting) or 1
  local fit = found.pages and math.floor(found.pages * (in_flight + 1) / (load.pages + need)) or found.slots
  local slots = math.max(1, math.min(found.slots, fit))
  local wait = share * queued
  if in_flight < slots then
    wait = share * load.queued_rows * found.row  -- claimed at once; what waits decodes beside it
  else
    wait = wait + running  -- at the latest when all that runs has ended
  end
  -- Prompts of others lengthen the time between tokens by as much as prompts are of all the work.
  local prompts = (load.queued_rows + load.running_rows + prompt) * found.row
  local tokens = (load.queued_tokens + load.running_tokens + most) * found.token
  local batch = math.min(slots, in_flight + 1) / math.max(1, found.workers)
  local step = found.step * math.max(1, batch / found.batch)
  local first = load.running_rows * found.row + prompt * found.slowest + step
  local stretch = tokens > 0 and (prompts + tokens) / tokens or 1
  return wait, first, first + math.max(0, most - 1) * step * stretch
end
