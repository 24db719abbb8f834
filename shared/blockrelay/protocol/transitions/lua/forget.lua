-- FORGET: memory is short, so ended requests are deleted before their retention is over: the oldest first, and those with a
-- retention of their own (with a key, or in the background) last. Requests that ended or were read a moment ago stay, since a
-- client may be reading them. A request with a forgotten key is computed again, with the same answer.
-- Keeps I2 (only ended requests).
-- needs: requests/record
-- Arguments: max_requests
-- Answer: {requests forgotten, ended requests that are still listed (some may be beyond their retention)}
-- FRESH: milliseconds after its end in which a request is never forgotten. SKIPPED: requests being read that a call may pass
-- over, so that it reaches those that ended after them.
local FRESH, SKIPPED = 10000, 1024

local function read_now(id, moved)
  local asked = redis.call('TTL', P .. 'followers:' .. id)
  return math.abs(NOW - tonumber(moved)) < FRESH or asked > retention() - FRESH / 1000
end

local gone, left = 0, 0
for _, kind in ipairs({'first', 'last'}) do
  for _, id in ipairs(redis.call('LRANGE', P .. 'ended:' .. kind, 0, ARGS.max_requests + SKIPPED - 1)) do
    if gone >= ARGS.max_requests then break end
    local r = redis.call('HMGET', P .. 'request:' .. id, 'state', 'progress_ms')
    if r[1] ~= 'done' then  -- beyond its retention, or started again
      redis.call('LREM', P .. 'ended:' .. kind, 1, id)
    elseif not read_now(id, r[2]) then
      redis.call('DEL', P .. 'request:' .. id, P .. 'log:' .. id)
      redis.call('LREM', P .. 'ended:' .. kind, 1, id)
      gone = gone + 1
    end
  end
  left = left + redis.call('LLEN', P .. 'ended:' .. kind)
end
return {gone, left}
