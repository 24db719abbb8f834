-- FINISH: ends a request by decision (cancelled, expired, error). An ended request stays ended.
-- Keeps I5, I12, I14 (with a WAIT after it), I16 (a request that a GPU has taken is not ended for lack of one).
-- needs: requests/record, requests/finish, requests/dead_letters
-- Arguments: request, reason, meta, run (or nothing; only while that run is current), denied (only while it waits for
--   a GPU because it denies fallbacks), abandoned (only while no live gateway says that it has readers; ACCEPT of the same id
--   may then start it again), confirm (write even if it has ended already: WAIT follows)
-- Answer: FINISHED | DONE (it had ended before) | UNKNOWN | LOST (another run, or a GPU has come) | EARLY (not expired: it has
--   no deadline, or time is left by Redis' clock, which decides) | READ (not abandoned)
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
-- A request that could not be computed is kept as a dead letter even though its worker lives on.
local failed = ARGS.reason == 'error' and ARGS.meta ~= '' and cjson.decode(ARGS.meta) or {}
if failed.code == 'row_not_finite' or failed.code == 'execution_error' then dead_letter(r, failed.code, failed.error or '') end
finish(r, ARGS.reason, ARGS.meta)
if ARGS.abandoned then redis.call('HSET', P .. 'request:' .. r.id, 'abandoned', 1) end
return 'FINISHED'
