-- RERUN: the one answer to a failed job, missing pages, drain, a lost message, a stalled request. No-op unless `run` is current.
-- Keeps I3 (only the current run is queued again, once).
-- needs: requests/record, queue/rerun
-- Arguments: request, run, reason, block (where a GPU failed, or nothing) and its stage (nothing: the first), found (how
--   many leading tokens have their pages, where some lack or a GPU has let them go; nothing: not known), alone (nobody else
--   was computed when it ended the process that computes), detail and code (what the fallback event says of the failure, finer
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
