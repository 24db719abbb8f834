-- FORGET: room is short, so what has ended goes before its retention is over: the oldest first, and what can be computed
-- again or is waited for (keyed, in the background) last. Nothing that has not ended, nor what ended or was asked for a
-- moment ago: somebody may be reading it. A key that is forgotten computes the same answer again.
-- Keeps I2 (only what has ended).
-- needs: requests/record
-- Arguments: max_requests
-- Answer: {requests forgotten, requests that have ended and are still there (some may be beyond their retention)}
-- Milliseconds that everybody has to read an end. Names looked at beside those that go: so many may be read at once, and
-- what ended behind them still goes.
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
    if r[1] ~= 'done' then  -- beyond its retention, or begun anew
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
