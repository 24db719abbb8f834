-- How many times as long a step of a stage takes on a CPU as on the GPU that had it: as a scheduler predicts, and as workers
-- have measured. What is not known is nil.

-- Returns what schedulers predict for a model, by the first and last block of a stage, `3-5`.
local function predicted_slowdowns(model)
  local told = redis.call('HGET', P .. 'plan:' .. model, 'slowdowns')
  return told and cjson.decode(told) or {}
end

-- Returns the mean microseconds of a decode step of blocks `first` to `last` that a worker of just these has measured of late, and
-- the tokens in such a step.
local function measured_us(worker, first, last)
  local told = redis.call('HGET', P .. 'worker:' .. worker, 'block_times')
  local times, sum = told and cjson.decode(told), 0
  if not times or times.first ~= first or #times.seconds ~= last - first + 1 then return nil end
  for _, us in ipairs(times.seconds) do sum = sum + us end
  if sum > 0 then return sum, times.rows end
end

-- Returns a slowdown as events have it, with at most three decimals; nil for one that is too small for them.
local function told_slowdown(ratio)
  local rounded = math.floor(ratio * 1000 + 0.5) / 1000
  return rounded > 0 and rounded or nil
end
