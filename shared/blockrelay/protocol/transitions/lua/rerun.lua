-- RERUN: queues a request again after a failed job, missing pages, a drain, a lost message or a stall. Does nothing unless
-- `run` is the current run.
-- Keeps I3 (only the current run is queued again, once).
-- needs: requests/record, queue/rerun
-- Arguments: request, run, reason, block (where a GPU failed, or nothing) and its stage (nothing: the first), found (leading
--   tokens that have KV pages, where some are missing or have left a GPU; nothing: not known), alone (no other request was
--   computed when the computing process ended), detail and code (reason and error code for the fallback event, more precise
--   than reason; or nothing), lost (all GPUs of the worker's process have failed)
-- Answer: {1 when it ended that run, else 0; then the fallback events, as JSON, one for each stage that fell back}
local r = read_record(ARGS.request)
if not r or r.state ~= 'running' or r.run ~= ARGS.run then return {0} end
local failure = ARGS.block and {block = ARGS.block, stage = ARGS.stage, reason = ARGS.detail, code = ARGS.code,
  lost = function() return ARGS.lost end}
local answer = {1}
for _, event in ipairs(rerun(r, ARGS.reason, failure, ARGS.alone and r.id or nil, ARGS.found)) do
  answer[#answer + 1] = cjson.encode(event)
end
return answer
