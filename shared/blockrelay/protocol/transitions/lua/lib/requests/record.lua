-- The record of a request, `request:<id>`.

-- Its numbers and what they mean; a name with `_ms` is a time in Unix milliseconds of Redis' clock (0: none).
local NUMBERS = {
  v = 'number of the protocol under which it was accepted',
  committed = 'length of its log',
  prompt_tokens = 'tokens of its prompt',
  max_tokens = 'tokens that it may generate; for a chat without a limit, tokens that it is expected to generate',
  rows_to_compute = 'tokens of its prompt, and after a re-run of its log, that are still to be computed',
  pages_needed = 'KV pages that it needs at most',
  pages_reserved = 'KV pages that its run has reserved on each worker of its route',
  grow_at = 'log length at which its run reserves more (0: it never does)',
  deadline_ms = 'time after which nothing of it is computed',
  retention_s = 'seconds that its end can be read (0: setting of the cell)',
  result_bytes = 'bytes of its tensor result on the payload Redis (0: it has none)',
  deaths = 'worker deaths while it ran, at log length `deaths_at`',
  quarantine_deaths = 'worker deaths while it ran alone, at log length `deaths_at`',
  deaths_at = 'log length for which deaths and attempts are counted',
  attempts = 'runs that failed at log length `deaths_at`',
  missing_pages = 're-runs because cached KV pages were gone',
  varies = '1 if its last route has a nondeterministic worker',
  private = '1 if a route that computed some of it had a nondeterministic worker: its KV pages cannot be shared',
  steps = 'steps that its run has committed: a token, several verified draft tokens, or a tensor result each',
  gpu_blocks = 'blocks of its route on GPUs',
  cpu_blocks = 'blocks of its route on CPUs',
  gpu_executed = 'blocks that GPUs executed in committed steps of earlier runs',
  cpu_executed = 'blocks that CPUs executed in committed steps of earlier runs',
  denied_ms = 'time since which it waits for a GPU for `denied_block` (0: it does not wait)',
}
local TEXTS = {'state', 'run', 'route', 'class', 'model', 'job', 'fallbacks', 'numerics', 'tenant', 'share', 'exact', 'grammar', 'fallback',
  'denied_block', 'reusable'}

-- All fields of a record. COMMIT, which runs for every token, reads fewer, so the list is made only when needed.
local every_field
local function all_fields()
  if not every_field then
    every_field = {unpack(TEXTS)}
    for name in pairs(NUMBERS) do every_field[#every_field + 1] = name end
  end
  return every_field
end

-- Writes something harmless, for a script whose work was done already and whose caller sends WAIT next. WAIT covers only
-- writes of its own connection, and a replica that has this write has all earlier ones too.
local function write_for_wait(model)
  redis.call('HINCRBY', P .. 'totals:' .. model, 'accepted', 0)
end

-- Returns the record of a request as a table, numbers converted; nil if there is none. Reads all fields, or only `fields`,
-- the first of which must be in every record. Only a whole record may be passed to `finish` or `rerun`.
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

-- Returns the worker ids of a route.
local function members(route)
  local t = {}
  for w in string.gmatch(route, '[^,]+') do t[#t + 1] = w end
  return t
end

-- Returns the numbers of blocks that GPUs and that CPUs executed for a request, in all committed steps of its runs.
local function executed(r)
  return r.gpu_executed + r.steps * r.gpu_blocks, r.cpu_executed + r.steps * r.cpu_blocks
end

-- Returns the numerics id under which a log continues: b in `a+b@17`, where b computed the tokens after the first 17.
local function id_of(numerics) return string.match(numerics, '([^+@]+)@?%d*$') end

-- Whether a log must continue under its numerics id: it has tokens, and that id could compute them again.
local function pinned(r) return r.committed > 0 and r.numerics ~= '' and r.varies == 0 end
