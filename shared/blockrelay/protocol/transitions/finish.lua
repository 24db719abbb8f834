-- FINISH: end a request by decision (cancelled, expired, error). Terminal is absorbing.
-- Keeps I5.
-- ARGV: retention, id, reason, meta, run ('' or: only while that run is current), abandoned (1: ACCEPT of the same id
--   may begin it anew, since nobody has read the end; nothing happens while a gateway that lives says that it has readers)
-- Answer: FINISHED | DONE (it had ended before) | UNKNOWN | LOST (another run) | READ (not abandoned)
local r = load(ARGV[2])
if not r then return 'UNKNOWN' end
if r.state == 'done' then return 'DONE' end
if ARGV[5] and ARGV[5] ~= '' and r.run ~= ARGV[5] then return 'LOST' end
if ARGV[6] == '1' then
  for _, gateway in ipairs(redis.call('HKEYS', P .. 'followers:' .. r.id)) do
    if redis.call('EXISTS', P .. 'gateway:' .. gateway) == 1 then return 'READ' end
  end
end
-- What failed without killing its worker is kept too.
local failed = ARGV[3] == 'error' and ARGV[4] ~= '' and cjson.decode(ARGV[4]) or {}
if failed.code == 'row_not_finite' or failed.code == 'execution_error' then bury(r, failed.code, failed.error or '') end
finish(r, ARGV[3], ARGV[4])
if ARGV[6] == '1' then redis.call('HSET', P .. 'request:' .. r.id, 'abandoned', 1) end
return 'FINISHED'
