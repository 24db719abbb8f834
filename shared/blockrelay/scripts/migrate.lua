-- MIGRATE: re-runs whose numerics id nobody serves any more may go on under another one.
-- How long nobody has been there is what calls of this script have seen, added up in `numerics:<model>`: a time in which
-- nobody looked (Redis or schedulers away, a clock set anew) counts as two seconds at most, and a worker that comes ends it.
-- Keeps I3, I13.
-- ARGV: retention, model, milliseconds without a beat that make a worker dead, milliseconds without a worker of an id after
--   which its requests go on under another
-- Answer: per class and numerics id that re-runs wait for {class, id, how many wait, ms without a worker (-1: one lives),
--   how many may go on under another id from now on}
local model, dead_after, patience = ARGV[2], tonumber(CELL[2] or ARGV[3]), tonumber(ARGV[4])
local LONGEST_LOOK, MOST = 2000, 64
local key, answer, served = P .. 'numerics:' .. model, {}, {}
local awaited = redis.call('HGETALL', key)
for i = 1, #awaited, 2 do
  local class, id = string.match(awaited[i], '^(%a+):(.+)$')
  local stream = P .. 'pinned:' .. model .. ':' .. class .. ':' .. id
  local waiting = redis.call('XLEN', stream)
  served[class] = served[class] or serving(model, class, dead_after)
  if waiting == 0 then
    redis.call('HDEL', key, awaited[i])
    redis.call('DEL', stream)
  elseif served[class][id] then
    if awaited[i + 1] ~= '' then redis.call('HSET', key, awaited[i], '') end
    answer[#answer + 1] = {class, id, waiting, -1, 0}
  else
    local absent, seen = string.match(awaited[i + 1], '^(%d+) (%d+)$')
    absent, seen = tonumber(absent or 0), tonumber(seen or NOW)
    if NOW > seen then absent = absent + math.min(NOW - seen, LONGEST_LOOK) end
    redis.call('HSET', key, awaited[i], string.format('%d %d', absent, NOW))
    local freed = 0
    if absent >= patience then
      for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+', 'COUNT', MOST)) do
        local r = load(entry[2][2])
        redis.call('XDEL', stream, entry[1])
        if r and r.state == 'queued' and r.job == 'pinned ' .. entry[1] then
          enqueue(r)
          freed = freed + 1
        end
      end
    end
    answer[#answer + 1] = {class, id, waiting - freed, absent, freed}
  end
end
return answer
