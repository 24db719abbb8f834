-- BEAT: a worker's heartbeat. The worker compares the answer with its own runs. Also queues re-runs whose delay is over.
-- Keeps I3 (a run that only one side knows is queued again or dropped).
-- needs: requests/record, queue/rerun_queue
-- Arguments: worker, pace (or nothing): row_us (microseconds per prompt token), step_us (`requests at once:microseconds
--   between two tokens` ...), recent_concurrency (most requests at once of late); pages_used (KV pages in use, or nothing);
--   memory (or nothing): held (bytes of its stage), free (bytes of free memory on its machine); block_times (JSON of the times of its blocks, or nothing);
--   goes_on (or nothing): it is in a long step and has done part of it, so none of its requests is stuck
-- Answer: false when its inbox is gone (it was declared dead: it must forget all runs and register under a new id),
-- else a list of {request, run} of worker-requests:<worker>.
local w = ARGS.worker
if redis.call('EXISTS', P .. 'inbox:' .. w, P .. 'worker:' .. w) < 2 then return false end
redis.call('ZADD', P .. 'workers', NOW, w)
if ARGS.pages_used then redis.call('HSET', P .. 'worker:' .. w, 'pages_used', ARGS.pages_used) end
local memory = ARGS.memory
if memory then redis.call('HSET', P .. 'worker:' .. w, 'held_bytes', memory.held, 'free_bytes', memory.free) end
local pace = ARGS.pace
if pace then redis.call('HSET', P .. 'worker:' .. w, 'row_us', pace.row_us, 'step_us', pace.step_us, 'recent_concurrency', pace.recent_concurrency) end
if ARGS.block_times then redis.call('HSET', P .. 'worker:' .. w, 'block_times', ARGS.block_times) end
promote()
local answer = {}
for _, id in ipairs(redis.call('SMEMBERS', P .. 'worker-requests:' .. w)) do
  if ARGS.goes_on then redis.call('ZADD', P .. 'running', 'XX', NOW, id) end
  answer[#answer + 1] = {id, redis.call('HGET', P .. 'request:' .. id, 'run') or ''}
end
return answer
