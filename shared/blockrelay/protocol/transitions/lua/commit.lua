-- COMMIT: appends tokens to the logs of many requests, with one answer each; a bad commit does not affect the others. A run of
-- several stages reserves more KV pages as its log grows; where there are too few, the request that was accepted last gives way.
-- Keeps I1 (run and positions are compared), I4, I5, I12 (no token after the deadline).
-- needs: requests/record, requests/timeline
-- Arguments: commits: for each request {request, run, position (length of the log before these tokens), tokens,
--   logprobs (or nothing), end (reason, or nothing), meta, rows (with the first tokens of a re-run: how many known tokens it
--   computed again, without the last one; else nothing)}
-- Answers: {verdict, log length}: OK | LOST (other run, gone or finished) | DIVERGED (the log has another token there)
--   | GAP (the log is shorter than position) | EXPIRED (deadline passed: finished)
local answers, spent, moved = {}, {}, {}
-- Makes `finish` and `rerun` on the first call: most calls of this script need neither (see source.py for the figures).
local made
local function endings()
  if made then return made end
  -- needs: queue/rerun
  made = {finish = finish, rerun = rerun, grow = grow}
  return made
end
-- The fields that a request which continues needs. This script runs for every token, and reading a whole record would be
-- most of its time.
local GOING_ON = {'state', 'run', 'committed', 'route', 'model', 'deadline_ms', 'max_tokens', 'rows_to_compute', 'private', 'steps',
  'grow_at'}
-- Adds up what to take off `outstanding:<model>` at the end of the call: before, r had `left` tokens to generate and `rows`
-- tokens to compute.
local function spend(r, left, rows)
  local s = spent[r.model] or {0, 0}
  s[1], s[2] = s[1] + left - math.max(0, r.max_tokens - r.committed), s[2] + rows - r.rows_to_compute
  spent[r.model] = s
end
-- A re-run has its first tokens: writes how many tokens it computed again into the fallback events that lack the number.
local function tell_rows(id, rows)
  redis.call('HSET', P .. 'request:' .. id, 'reusable', '')  -- it held only for the position of the failed run
  local fallbacks = redis.call('HGET', P .. 'request:' .. id, 'fallbacks')
  if not fallbacks or fallbacks == '' then return end
  local list = cjson.decode(fallbacks)
  for _, event in ipairs(list) do event.rows = event.rows or rows end
  redis.call('HSET', P .. 'request:' .. id, 'fallbacks', cjson.encode(list))
end
-- Reserves the pages of a run whose log has reached `grow_at`; other runs may give way. False if it gave way itself.
local function has_pages(id, r)
  if r.grow_at == 0 or r.committed < r.grow_at then return true end
  return endings().grow(read_record(id), function(other) endings().rerun(read_record(other), 'preempted') end)
end
-- Writes the time of progress of many requests at once, as many as `unpack` takes. Ended ones are not in `running` any more.
local function mark_moved()
  if #moved > 0 then redis.call('ZADD', P .. 'running', 'XX', unpack(moved)) end
  moved = {}
end
for _, item in ipairs(ARGS.commits) do
  local id, run, position, tokens, logprobs = item.request, item.run, item.position, item.tokens, item.logprobs
  local r = read_record(id, GOING_ON)
  local verdict
  if not r or r.state ~= 'running' or r.run ~= run then
    verdict = 'LOST'
  elseif position > r.committed then
    verdict = 'GAP'
  else
    for k, token in ipairs(tokens) do
      if position + k <= r.committed then
        local at = (position + k) .. '-0'
        local known = redis.call('XRANGE', P .. 'log:' .. id, at, at)
        if known[1][2][2] ~= tostring(token) then verdict = 'DIVERGED' end
      end
    end
    if not verdict and r.deadline_ms > 0 and NOW > r.deadline_ms then
      endings().finish(read_record(id), 'expired', '')
      verdict = 'EXPIRED'
    end
    if not verdict then
      verdict = 'OK'
      local fresh = position + #tokens - r.committed
      for k, token in ipairs(tokens) do
        if position + k > r.committed then
          local entry = {'token', token}
          if logprobs and logprobs[k] ~= '' then
            entry[3], entry[4] = 'logprobs', logprobs[k]
          end
          if position + k == 1 then  -- so that readers of the log need not read the record
            entry[#entry + 1] = 'numerics'; entry[#entry + 1] = redis.call('HGET', P .. 'request:' .. id, 'numerics')
          end
          -- Also for tokens that CPUs computed after a nondeterministic device. The gateway shows these only once replicated.
          if r.private == 1 then
            entry[#entry + 1] = 'varies'; entry[#entry + 1] = 1
          end
          redis.call('XADD', P .. 'log:' .. id, (position + k) .. '-0', unpack(entry))
        end
      end
      local left, rows = math.max(0, r.max_tokens - r.committed), r.rows_to_compute
      r.committed = math.max(r.committed, position + #tokens)
      if fresh > 0 then
        if rows > 0 then redis.call('HSET', P .. 'request:' .. id, 'rows_to_compute', 0) end
        r.rows_to_compute = 0
        spend(r, left, rows)
        if r.committed == fresh then
          redis.call('HSETNX', P .. 'request:' .. id, 'first_token_ms', NOW)
          timeline_event(id, 't')
        end
        redis.call('HSET', P .. 'request:' .. id, 'committed', r.committed, 'progress_ms', NOW, 'steps', r.steps + 1)
        moved[#moved + 1] = NOW; moved[#moved + 1] = id
        if #moved >= 512 then mark_moved() end
      end
      if item.rows then tell_rows(id, item.rows) end
      if item['end'] then
        local whole = read_record(id)
        if #tokens == 0 then whole.steps = whole.steps + 1 end  -- it commits no token
        endings().finish(whole, item['end'], item.meta)
      elseif fresh > 0 and string.find(r.route, ',', 1, true) and has_pages(id, r) then
        -- The next job goes to the worker of the first stage; without its inbox that worker is dead.
        local next_job = cmsgpack.pack({id, run, position, tokens})
        local inbox = P .. 'inbox:' .. string.match(r.route, '^[^,]+')
        if not redis.call('XADD', inbox, 'NOMKSTREAM', '*', 'next_job', next_job) then endings().rerun(read_record(id), 'no_inbox') end
      end
    end
  end
  answers[#answers + 1] = {verdict, r and r.committed or 0}
end
mark_moved()
for model, s in pairs(spent) do
  if s[1] ~= 0 then redis.call('HINCRBY', P .. 'outstanding:' .. model, 'running_tokens', -s[1]) end
  if s[2] ~= 0 then redis.call('HINCRBY', P .. 'outstanding:' .. model, 'running_rows', -s[2]) end
end
return answers
