-- RERUN: the one answer to a failed job, missing pages, drain, a lost message, a stalled request. No-op unless `run` is current.
-- Keeps I3 (only the current run is queued again, once).
-- ARGV: retention, id, run, reason, block where a GPU failed ('' none; with one the class becomes cpu)
-- Answer: 1 when it ended that run, else 0
local r = load(ARGV[2])
if not r or r.state ~= 'running' or r.run ~= ARGV[3] then return 0 end
rerun(r, ARGV[4], ARGV[5] ~= '' and ARGV[5] or nil)
return 1
