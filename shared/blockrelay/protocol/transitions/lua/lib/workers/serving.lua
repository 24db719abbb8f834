-- The numerics ids under which live workers can continue a log.
-- needs: workers/fleet

-- Returns, for each numerics id that has a worker for each stage of a split, how many KV pages a request may need at most: the
-- whole pool of its smallest stage. Counts live deterministic workers of the model that do not drain.
local function serving(model)
  local found, pools, all = {}, {}, registered()
  for i = 1, #all, 2 do
    if is_alive(all[i + 1]) then
      local w = all[i]
      local v = redis.call('HMGET', P .. 'worker:' .. w, 'model', 'split', 'stage', 'varies', 'numerics', 'draining', 'pages')
      if v[1] == model and v[3] and not v[6] and v[4] ~= '1'
        and redis.call('EXISTS', P .. 'inbox:' .. w) == 1 then
        local route = v[5] .. ' ' .. v[2]
        pools[route] = pools[route] or {}
        pools[route][v[3]] = math.max(pools[route][v[3]] or 0, tonumber(v[7] or 0))
      end
    end
  end
  for route, stages in pairs(pools) do
    local id, split = string.match(route, '^(%S+) (.+)$')
    local _, commas = string.gsub(split, ',', '')
    local most = math.huge
    for s = 0, commas do most = math.min(most, stages[string.format('%d', s)] or -1) end
    if most >= 0 then found[id] = math.max(found[id] or 0, most) end
  end
  return found
end
