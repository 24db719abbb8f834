-- The record of a request, `request:<id>`.

local FIELDS = {'state', 'v', 'run', 'n', 'route', 'need', 'class', 'model', 'deadline', 'deaths', 'solo_deaths', 'deaths_n', 'tries',
  'missing', 'job', 'fallbacks', 'numerics', 'prompt', 'held', 'keep', 'tenant', 'most', 'rows', 'share', 'exact', 'result'}

local NUMBERS = {}
for _, f in ipairs({'v', 'n', 'need', 'deadline', 'deaths', 'solo_deaths', 'deaths_n', 'tries', 'missing', 'prompt', 'held', 'keep', 'most', 'rows', 'result'}) do
  NUMBERS[f] = true
end

-- The record of a request as a table, or nil: all of it, or `fields`, the first of which every record has. Numbers are
-- converted. Only a whole one may be ended or queued again.
local function read_record(id, fields)
  fields = fields or FIELDS
  local v = redis.call('HMGET', P .. 'request:' .. id, unpack(fields))
  if not v[1] then return nil end
  local r = {id = id}
  for i, f in ipairs(fields) do
    if NUMBERS[f] then r[f] = tonumber(v[i] or '') or 0 else r[f] = v[i] or '' end
  end
  return r
end

local function members(route)
  local t = {}
  for w in string.gmatch(route, '[^,]+') do t[#t + 1] = w end
  return t
end

-- The numerics id under which a log goes on: the last of `a+b@17`, where b has computed what stands behind 17 tokens.
local function id_of(numerics) return string.match(numerics, '([^+@]+)@?%d*$') end

-- Tokens that there are decide the numerics id.
local function pinned(r) return r.n > 0 and r.numerics ~= '' end
