-- UPGRADE: bring the keys and records of an older protocol to one of ours, a few keys at a time. While it lasts the number of
-- the cell is `<older>><target>`, so that no service of either joins; each key is changed whole or not at all, and a second
-- time it is left as it is, so that whoever dies here is followed by a scheduler that begins again. From the lowest number
-- that we speak on nothing has to be changed: the number alone is raised.
-- Protocol 1 and 2 call fields and keys otherwise; in protocol 1 the number and some fields are missing, which read as 0.
-- Arguments: from ('' for protocol 1, which has no number) and target to begin, from and raise (the higher number) to raise;
--   names (of keys) to change; finish (true) to end.
-- Answer: 1 when it began, ended or was raised, or how many keys were changed; -1 when the cell is not being brought to a
--   protocol of ours, or speaks another number than `from`
local FIELDS = {
  request = {n = 'committed', need = 'pages_needed', held = 'pages_reserved', keep = 'retention_s', prompt = 'prompt_tokens',
    most = 'max_tokens', rows = 'rows_to_compute', deadline = 'deadline_ms', deaths_n = 'deaths_at',
    solo_deaths = 'quarantine_deaths', tries = 'attempts', missing = 'missing_pages', result = 'result_bytes',
    fp = 'fingerprint', accepted = 'accepted_ms', claimed = 'claimed_ms', first = 'first_token_ms', moved = 'progress_ms',
    solo = 'quarantined', why = 'rerun_reason'},
  worker = {reserved = 'pages_reserved', first = 'first_block', last = 'last_block', registered = 'registered_ms',
    steps = 'step_us', lately = 'recent_concurrency'},
  session = {fp = 'fingerprint'},
  log = {t = 'token', p = 'logprobs'},
  letter = {r = 'request', n = 'committed', why = 'reason'},
}
local spoken = redis.call('GET', P .. 'protocol') or ''
local target = tonumber(string.match(spoken, '^%d+>(%d+)$') or '0')

-- The version goes up with the names: a record that has ours is left alone.
local function rename_fields(name, names)
  local pairs_of, old = redis.call('HGETALL', name), {}
  if not pairs_of[1] or tonumber(redis.call('HGET', name, 'v') or '1') >= LOWEST_PROTOCOL then return false end
  local new = {'v', target}
  for i = 1, #pairs_of, 2 do
    local renamed = names[pairs_of[i]]
    if renamed then
      old[#old + 1] = pairs_of[i]; new[#new + 1] = renamed; new[#new + 1] = pairs_of[i + 1]
    end
  end
  redis.call('HSET', name, unpack(new))
  if old[1] then redis.call('HDEL', name, unpack(old)) end
  return true
end

-- A stream whose entries call their fields otherwise is written anew under the same ids.
local function rename_in_stream(name, names)
  local first = redis.call('XRANGE', name, '-', '+', 'COUNT', 1)[1]
  if not first or not names[first[2][1]] then return false end
  local left, aside = redis.call('PTTL', name), P .. 'packing'
  for _, entry in ipairs(redis.call('XRANGE', name, '-', '+')) do
    for i = 1, #entry[2], 2 do entry[2][i] = names[entry[2][i]] or entry[2][i] end
    redis.call('XADD', aside, entry[1], unpack(entry[2]))
  end
  redis.call('COPY', aside, name, 'REPLACE')
  redis.call('DEL', aside)
  if left >= 0 then redis.call('PEXPIRE', name, left) end
  return true
end

-- What a family is called now, and how a key of it gets there: sums and members may be there under the new name already, of
-- what was accepted while nobody knew the old. Names of the families at both ends stand here, so that they are declared.
local function add_sums(name, new)
  local sums = redis.call('HGETALL', name)
  for i = 1, #sums, 2 do redis.call('HINCRBY', new, sums[i], sums[i + 1]) end
end
local function add_members(name, new) redis.call('SUNIONSTORE', new, new, name) end
local function copy(name, new) redis.call('COPY', name, new, 'REPLACE') end
local MOVES = {
  [P .. 'load:'] = {P .. 'outstanding:', add_sums},
  [P .. 'of:'] = {P .. 'tenant-requests:', add_members},
  [P .. 'on:'] = {P .. 'worker-requests:', add_members},
  [P .. 'trying:'] = {P .. 'quarantine:', copy},
}
-- The registry as scripts last saw it is made again.
local function drop(name) return redis.call('DEL', name) == 1 end
-- No worker of the older protocol has the run that the record now names: what one that had stood still sends is LOST. The
-- run ends as any that nobody goes on with: with the death of its worker, or because it is stalled.
local function rename_request(name, names)
  if not rename_fields(name, names) then return false end
  local found = redis.call('HMGET', name, 'state', 'model')
  if found[1] == 'running' then redis.call('HSET', name, 'run', '') end
  -- Older protocols kept no books: those that have not ended count as accepted now.
  if found[1] ~= 'done' then redis.call('HINCRBY', P .. 'totals:' .. found[2], 'accepted', 1) end
  return true
end
local RENAMES = {
  [P .. 'fleet:'] = {drop},
  [P .. 'request:'] = {rename_request, FIELDS.request},
  [P .. 'worker:'] = {rename_fields, FIELDS.worker},
  [P .. 'session:'] = {rename_fields, FIELDS.session},
  [P .. 'log:'] = {rename_in_stream, FIELDS.log},
  [P .. 'dead-letters'] = {rename_in_stream, FIELDS.letter},
}

local function change(name)
  local family, rest = string.match(name, '^(%b{}:[^:]+:?)(.*)$')
  local move, rename = MOVES[family], RENAMES[family]
  if move then
    move[2](name, move[1] .. rest)
    return redis.call('DEL', name) == 1
  end
  return rename and rename[1](name, rename[2])
end

if ARGS.raise then
  if spoken ~= ARGS.from then return -1 end
  redis.call('SET', P .. 'protocol', ARGS.raise)
  return 1
end
if ARGS.from and spoken == ARGS.from then
  redis.call('SET', P .. 'protocol', (ARGS.from == '' and '1' or ARGS.from) .. '>' .. ARGS.target)
  return 1
end
if target < LOWEST_PROTOCOL or target > PROTOCOL then return -1 end
if ARGS.from then return 1 end
if ARGS.finish then
  redis.call('SET', P .. 'protocol', target)
  return 1
end
local changed = 0
for _, name in ipairs(ARGS.names) do
  if change(name) then changed = changed + 1 end
end
return changed
