-- FINISH: end a request by decision (cancelled, expired, error). Terminal is absorbing.
-- Keeps I5, I12, I14 (with WAIT behind it), I16 (a request that a GPU has taken is not ended for want of one).
-- needs: requests/record, requests/finish, requests/dead_letters
-- Arguments: request, reason, meta, run (or nothing; only while that run is current), denied (only while it waits for
--   a GPU, since no CPU may take the place of one that failed), abandoned (ACCEPT of the same id
--   may begin it anew, since nobody has read the end; nothing happens while a gateway that lives says that it has readers),
--   confirm (write even where it has ended already: WAIT follows)
-- Answer: FINISHED | DONE (it had ended before) | UNKNOWN | LOST (another run, or a GPU has come) | EARLY (not expired: it has
--   no deadline, or by this clock, which decides, time is left; the caller's may have been set anew) | READ (not abandoned)
local r = read_record(ARGS.request)
if not r then return 'UNKNOWN' end
if r.state == 'done' then
  if ARGS.confirm then write_for_wait(r.model) end
  return 'DONE'
end
if ARGS.denied and r.denied_block == '' then return 'LOST' end
if ARGS.run and r.run ~= ARGS.run then return 'LOST' end
if ARGS.reason == 'expired' and (r.deadline_ms == 0 or NOW <= r.deadline_ms) then return 'EARLY' end
if ARGS.abandoned then
  for _, gateway in ipairs(redis.call('HKEYS', P .. 'followers:' .. r.id)) do
    if redis.call('EXISTS', P .. 'gateway:' .. gateway) == 1 then return 'READ' end
  end
end
-- What failed without killing its worker is kept too.
local failed = ARGS.reason == 'error' and ARGS.meta ~= '' and cjson.decode(ARGS.meta) or {}
if failed.code == 'row_not_finite' or failed.code == 'execution_error' then dead_letter(r, failed.code, failed.error or '') end
finish(r, ARGS.reason, ARGS.meta)
if ARGS.abandoned then redis.call('HSET', P .. 'request:' .. r.id, 'abandoned', 1) end
return 'FINISHED'
