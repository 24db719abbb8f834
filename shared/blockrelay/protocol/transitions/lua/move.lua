-- MOVE: records that a name (of a request with a key, or of a session) belongs to another cell by a newer list of cells,
-- unless its request or session is here. ACCEPT then refuses the name here to callers that have an older list, so that it is
-- never in two cells.
-- Keeps I9 (one key is one request) across lists.
-- Arguments: name, version (of the list), retention_s, request (id that the name may have here; '': none), sessions (the same)
-- Answer: HERE | MOVED
local request, sessions = ARGS.request, ARGS.sessions
if request ~= '' then
  local known = redis.call('HMGET', P .. 'request:' .. request, 'state', 'abandoned')
  if known[1] and not known[2] then return 'HERE' end
end
for _, session in ipairs(sessions) do
  if redis.call('EXISTS', P .. 'session:' .. session) == 1 then return 'HERE' end
end
local version = math.max(ARGS.version, tonumber(redis.call('GET', P .. 'moved:' .. ARGS.name) or '0'))
redis.call('SET', P .. 'moved:' .. ARGS.name, version, 'EX', ARGS.retention_s)
return 'MOVED'
