-- BEAT: the worker lives. It compares the answer with its own table. Re-runs whose delay is over are queued on the way.
-- Keeps I3 (what either side does not know is re-run or dropped).
-- needs: requests/record, queue/rerun_queue
-- Arguments: worker, pace (or nothing): row_us (microseconds of a prompt row), step_us (`at once:microseconds between two
--   tokens` ...), recent_concurrency (most at once of late); pages_used (of its KV pages, or nothing); goes_on (or
--   nothing): its step is long and has done a part, so none of its requests is stuck
-- Answer: false when its inbox is gone (it was declared dead: forget all runs, register under a new id),
-- else a list of {request, run} of worker-requests:<worker>.
local w = ARGS.worker
if redis.call('EXISTS', P .. 'inbox:' .. w, P .. 'worker:' .. w) < 2 then return false end
redis.call('ZADD', P .. 'workers', NOW, w)
if ARGS.pages_used then redis.call('HSET', P .. 'worker:' .. w, 'pages_used', ARGS.pages_used) end
local pace = ARGS.pace
if pace then redis.call('HSET', P .. 'worker:' .. w, 'row_us', pace.row_us, 'step_us', pace.step_us, 'recent_concurrency', pace.recent_concurrency) end
promote()
local answer = {}
for _, id in ipairs(redis.call('SMEMBERS', P .. 'worker-requests:' .. w)) do
  if ARGS.goes_on then redis.call('ZADD', P .. 'running', 'XX', NOW, id) end
  answer[#answer + 1] = {id, redis.call('HGET', P .. 'request:' .. id, 'run') or ''}
end
return answer
