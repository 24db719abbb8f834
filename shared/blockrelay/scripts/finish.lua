-- FINISH: end a request by decision (cancelled, expired, error). Terminal is absorbing.
-- ARGV: retention, id, reason, meta, [run: only while that run is current]
-- Answer: FINISHED | DONE (it had ended before) | UNKNOWN | LOST (another run)
local r = load(ARGV[2])
if not r then return 'UNKNOWN' end
if r.state == 'done' then return 'DONE' end
if ARGV[5] and ARGV[5] ~= '' and r.run ~= ARGV[5] then return 'LOST' end
finish(r, ARGV[3], ARGV[4])
return 'FINISHED'
