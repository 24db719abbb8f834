-- DEAD: declares a worker dead: queues all requests of worker-requests:<worker> again, whatever the worker's stage, and
-- deletes its inbox and record.
-- Keeps I3 (no run has a dead worker), I4, I7 (counts only against a request that ran alone), I16 (a drain is no failure).
-- needs: requests/record, queue/rerun
-- Arguments: worker, silent_ms (without a heartbeat that make it dead; 0: its process was seen to end),
--   reason (death | drain | forgotten)
-- Answer: {1 when this call declared it dead, else 0; number of re-runs}
local EXACT_RETURNS = 60000  -- ms in which a deterministic worker, or another in its place, is expected back
local w = ARGS.worker
local beat = redis.call('ZSCORE', P .. 'workers', w)
local after = ARGS.silent_ms
-- A heartbeat from the future is from before the clock was set back. A live worker has sent another since (callers wait).
if beat and after > 0 and math.abs(NOW - tonumber(beat)) < after then return {0, 0} end
local on = redis.call('SMEMBERS', P .. 'worker-requests:' .. w)
if not beat and #on == 0 and redis.call('EXISTS', P .. 'worker:' .. w, P .. 'inbox:' .. w) == 0 then return {0, 0} end
local v = redis.call('HMGET', P .. 'worker:' .. w, 'device', 'first_block', 'model', 'stage', 'varies')
local tried = redis.call('GET', P .. 'quarantine:' .. w) or nil
-- Whether another worker of the same process is lost too: always if the process was seen to end, else if it is silent.
local function lost(other)
  local last = redis.call('ZSCORE', P .. 'workers', other)
  return after == 0 or not last or math.abs(NOW - tonumber(last)) > after / 3
end
local failure = v[1] == 'gpu' and v[2] and ARGS.reason == 'death' and {block = 'block_' .. v[2], stage = tonumber(v[4] or '0'),
  reason = 'worker_death', code = 'INTERNAL', lost = lost}
local count = 0
for _, id in ipairs(on) do
  local r = read_record(id)
  if r and r.state == 'running' and string.find(',' .. r.route .. ',', ',' .. w .. ',', 1, true) then
    rerun(r, ARGS.reason, failure, tried)
    count = count + 1
  end
end
redis.call('DEL', P .. 'worker-requests:' .. w, P .. 'inbox:' .. w, P .. 'worker:' .. w, P .. 'quarantine:' .. w)
redis.call('ZREM', P .. 'workers', w)
if v[3] then
  redis.call('DEL', P .. 'fleet:' .. v[3])
  if v[5] ~= '1' then redis.call('SET', P .. 'exact-left:' .. v[3], w, 'PX', EXACT_RETURNS) end
  if ARGS.reason == 'death' then redis.call('HINCRBY', P .. 'totals:' .. v[3], 'deaths', 1) end
end
return {1, count}
