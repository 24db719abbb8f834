-- Which workers computed which tokens of a request: one entry in `ran` of its record for each run that a token came from.
-- `<tokens before it>@<runs before it>=<split> <stage>,<stage>;` where a stage is `<worker>/<device>/<epoch>/<numerics id>`. A part
-- that is equal to that of the stage before it is left out; before the first stage stand `cpu` and the numerics id that the
-- record has for these tokens. `<tokens>@<runs>;` if the stages are those of the entry before. blockrelay.protocol.records.provenance reads it.
-- needs: requests/record

-- Characters beyond which the oldest entries are dropped.
local MOST_RAN = 1500

-- Returns the stages of a route, which are workers {id, device_id, epoch, numerics}. `numerics`: the id of the whole route.
local function told_route(route, split, numerics)
  local stages, before = {}, {'', 'cpu', '', numerics}
  for i, c in ipairs(route) do
    local now, told = {c.id, c.device_id, c.epoch, c.numerics}, {}
    for part, value in ipairs(now) do told[part] = value == before[part] and '' or value end
    stages[i], before = string.gsub(table.concat(told, '/'), '/+$', ''), now
  end
  return split .. ' ' .. table.concat(stages, ',')
end

-- Drops the first entry; the next one gets its stages if it has none of its own.
local function without_first(ran)
  local first, rest = string.match(ran, '^([^;]*);(.*)$')
  local head, behind = string.match(rest, '^(%d+@%d+)(;.*)$')
  return head and head .. string.match(first, '=.*$') .. behind or rest
end

-- Notes the run that a request `r` begins on a `route`, after `runs_before` others.
local function note_run(r, route, split, numerics, runs_before)
  local ran = redis.call('HGET', P .. 'request:' .. r.id, 'ran') or ''
  -- A run that committed nothing has no part in the answer.
  local earlier, last = string.match(ran, '^(.-)([^;]*;)$')
  if last and string.match(last, '^%d+') == string.format('%d', r.committed) then ran = earlier end
  local told, known = told_route(route, split, numerics), nil
  for one in string.gmatch(ran, '=([^;]*);') do known = one end
  local same_id = r.numerics ~= '' and id_of(r.numerics) == numerics
  ran = ran .. string.format('%d@%d%s;', r.committed, runs_before, told == known and same_id and '' or '=' .. told)
  while string.len(ran) > MOST_RAN and string.find(ran, ';.') do ran = without_first(ran) end
  redis.call('HSET', P .. 'request:' .. r.id, 'ran', ran)
end
