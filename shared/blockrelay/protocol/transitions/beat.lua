-- BEAT: the worker lives. It compares the answer with its own table. Re-runs whose delay is over are queued on the way.
-- Keeps I3 (what either side does not know is re-run or dropped).
-- ARGV: retention, worker, [microseconds of a prompt row, `at once:microseconds between two tokens`…, most at once lately]
-- Answer: false when its inbox is gone (it was declared dead: forget all runs, register under a new id),
-- else a list of {request, run} of on:<worker>.
local w = ARGV[2]
if redis.call('EXISTS', P .. 'inbox:' .. w, P .. 'worker:' .. w) < 2 then return false end
redis.call('ZADD', P .. 'workers', NOW, w)
if ARGV[3] then redis.call('HSET', P .. 'worker:' .. w, 'row_us', ARGV[3], 'steps', ARGV[4], 'lately', ARGV[5]) end
promote()
local answer = {}
for _, id in ipairs(redis.call('SMEMBERS', P .. 'on:' .. w)) do
  answer[#answer + 1] = {id, redis.call('HGET', P .. 'request:' .. id, 'run') or ''}
end
return answer
