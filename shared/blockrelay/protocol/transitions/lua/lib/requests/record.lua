-- The record of a request, `request:<id>`.

-- Its fields; whatever ends in `_ms` is a time in Unix milliseconds of Redis' clock (0: none).
local NUMBERS = {
  v = 'the number of the protocol under which it was accepted',
  committed = 'the length of its log',
  prompt_tokens = 'of its prompt',
  max_tokens = 'that it may generate; of a chat that named no limit, that it is expected to',
  rows_to_compute = 'of its prompt, and after a re-run of its committed tokens, that nobody has computed',
  pages_needed = 'KV pages that it needs at the most',
  pages_reserved = 'of those, what its run holds on each worker of its route',
  deadline_ms = 'after which nothing of it is computed',
  retention_s = 'how long its end can be read (0: as usual)',
  result_bytes = 'what its tensor result takes of the payload Redis (0: it has none)',
  deaths = 'of workers that ran it, since its log was as long as now',
  quarantine_deaths = 'of those, while it ran alone',
  deaths_at = 'the length of the log for which these are counted',
  attempts = 'runs that failed at this length',
  missing_pages = 're-runs because cached KV pages were gone',
  varies = 'whether its last route has a worker that does not compute the same bits twice (1)',
  private = 'whether a route that computed some of it had one (1): its KV pages are not what their tokens alone decide',
  steps = 'that its run has committed: a token or several guessed ones each, or a tensor result',
  gpu_blocks = 'that its route has on GPUs',
  cpu_blocks = 'that its route has on CPUs',
  gpu_executed = 'blocks that GPUs have executed in the runs before: in each committed step all of theirs',
  cpu_executed = 'the same of CPUs',
  denied_ms = 'since when it waits for a GPU of the stage of `denied_block` (0: it does not)',
}
local TEXTS = {'state', 'run', 'route', 'class', 'model', 'job', 'fallbacks', 'numerics', 'tenant', 'share', 'exact', 'fallback', 'denied_block',
  'reusable'}

-- Of a whole record. A script that runs for every token asks for less, so the list is made when it is needed.
local every_field
local function all_fields()
  if not every_field then
    every_field = {unpack(TEXTS)}
    for name in pairs(NUMBERS) do every_field[#every_field + 1] = name end
  end
  return every_field
end

-- Of a script that found done what it should do, with WAIT behind it, which speaks of what its own connection wrote:
-- replicas that have this have what was there before.
local function write_for_wait(model)
  redis.call('HINCRBY', P .. 'totals:' .. model, 'accepted', 0)
end

-- The record of a request as a table, or nil: all of it, or `fields`, the first of which every record has. Numbers are
-- converted. Only a whole one may be ended or queued again.
local function read_record(id, fields)
  fields = fields or all_fields()
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

-- Blocks that GPUs and that CPUs have executed for a request, in all that its runs have committed.
local function executed(r)
  return r.gpu_executed + r.steps * r.gpu_blocks, r.cpu_executed + r.steps * r.cpu_blocks
end

-- The numerics id under which a log goes on: the last of `a+b@17`, where b has computed what stands behind 17 tokens.
local function id_of(numerics) return string.match(numerics, '([^+@]+)@?%d*$') end

-- Tokens that there are decide the numerics id, where it could compute them again.
local function pinned(r) return r.committed > 0 and r.numerics ~= '' and r.varies == 0 end
