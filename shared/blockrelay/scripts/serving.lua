-- Who could go on with a log: the numerics ids that live workers of a model, none of them draining, serve with a worker
-- for every stage of a split, as a set. `class` cpu: CPU workers alone. `dead_after`: milliseconds without a beat.
local function serving(model, class, dead_after)
  local found, staffed, all = {}, {}, registered()
  for i = 1, #all, 2 do
    if is_alive(all[i + 1], dead_after) then
      local w = all[i]
      local v = redis.call('HMGET', P .. 'worker:' .. w, 'model', 'split', 'stage', 'device', 'numerics', 'draining')
      if v[1] == model and v[3] and not v[6] and (class == 'gpu' or v[4] == 'cpu')
        and redis.call('EXISTS', P .. 'inbox:' .. w) == 1 then
        local route = v[5] .. ' ' .. v[2]
        staffed[route] = staffed[route] or {}
        staffed[route][v[3]] = true
      end
    end
  end
  for route, stages in pairs(staffed) do
    local id, split = string.match(route, '^(%S+) (.+)$')
    local _, commas = string.gsub(split, ',', '')
    local whole = true
    for s = 0, commas do whole = whole and stages[string.format('%d', s)] end
    if whole then found[id] = true end
  end
  return found
end
