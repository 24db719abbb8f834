-- MIGRATE: lets re-runs continue under another numerics id if no worker serves their own any more, or if they need more KV
-- pages than any pool of the workers that serve it.
-- The time without a worker is the sum of what calls of this script saw, kept in `numerics:<model>` with the number of pages
-- served. A gap between calls (Redis or schedulers away, a clock set forward) counts as two seconds at most, and the sum
-- starts again when a worker comes or goes and changes that number.
-- Keeps I3, I13.
-- needs: requests/record, queue/rerun_queue, workers/fleet, workers/serving
-- Arguments: model, patience_ms (without a worker of an id, after which its requests may continue under another)
-- Answer: per class and numerics id that re-runs wait for {class, id, how many wait, ms without a worker (-1: one lives),
--   how many may continue under another id from now on}; a second entry for re-runs that fit no pool of that id
local model, patience = ARGS.model, ARGS.patience_ms
local LONGEST_LOOK, MOST = 2000, 64
local key, answer, served = P .. 'numerics:' .. model, {}, nil
local awaited = redis.call('HGETALL', key)
for i = 1, #awaited, 2 do
  local class, id = string.match(awaited[i], '^(%a+):(.+)$')
  local stream = P .. 'pinned:' .. model .. ':' .. class .. ':' .. id
  local waiting = redis.call('XLEN', stream)
  served = served or serving(model)
  if waiting == 0 then
    redis.call('HDEL', key, awaited[i])
    redis.call('DEL', stream)
  else
    local most = served[id] or -1
    local absent, seen, before = string.match(awaited[i + 1], '^(%d+) (%d+) (%-?%d+)$')
    if tonumber(before) ~= most then absent, seen = 0, NOW end
    absent, seen = tonumber(absent), tonumber(seen)
    if NOW > seen then absent = absent + math.min(NOW - seen, LONGEST_LOOK) end
    redis.call('HSET', key, awaited[i], string.format('%d %d %d', absent, NOW, most))
    local too_large, freed = most < 0 and waiting or 0, 0
    if most >= 0 or absent >= patience then
      for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+', 'COUNT', MOST)) do
        local r = read_record(entry[2][2])
        local is_there = r and r.state == 'queued' and r.job == 'pinned ' .. entry[1]
        local fits = is_there and r.pages_needed <= most
        if most >= 0 and is_there and not fits then too_large = too_large + 1 end
        if absent >= patience and not fits then
          redis.call('XDEL', stream, entry[1])
          if is_there then
            enqueue(r)
            freed = freed + 1
          end
        end
      end
    end
    if waiting > too_large then answer[#answer + 1] = {class, id, waiting - too_large, -1, 0} end
    if too_large > 0 then answer[#answer + 1] = {class, id, too_large - freed, absent, freed} end
  end
end
return answer
