-- COMMIT: make tokens part of the log. Many requests, one answer each; a bad one never fails its neighbours.
-- Keeps I1 (run and positions are compared), I5, I12 (nothing behind a deadline).
-- ARGV: retention, then one msgpack array per request: {id, run, position, {tokens}, {logprobs or ''}, end reason or '', meta}
--   position = length of the log before these tokens
-- Answers: {verdict, log length}: OK | LOST (other run, gone or finished) | DIVERGED (the log has another token there)
--   | GAP (the log is shorter than position) | EXPIRED (deadline passed: finished)
local answers, spent = {}, {}
-- Off the books, once for the whole call: r had `left` tokens to come and `rows` to compute.
local function spend(r, left, rows)
  local s = spent[r.model] or {0, 0}
  s[1], s[2] = s[1] + left - math.max(0, r.most - r.n), s[2] + rows - r.rows
  spent[r.model] = s
end
for i = 2, #ARGV do
  local id, run, position, tokens, logprobs, ending, meta = unpack(cmsgpack.unpack(ARGV[i]))
  local r = load(id)
  local verdict
  if not r or r.state ~= 'running' or r.run ~= run then
    verdict = 'LOST'
  elseif position > r.n then
    verdict = 'GAP'
  else
    for k, token in ipairs(tokens) do
      if position + k <= r.n then
        local at = (position + k) .. '-0'
        local known = redis.call('XRANGE', P .. 'log:' .. id, at, at)
        if known[1][2][2] ~= tostring(token) then verdict = 'DIVERGED' end
      end
    end
    if not verdict and r.deadline > 0 and NOW > r.deadline then
      finish(r, 'expired', '')
      verdict = 'EXPIRED'
    end
    if not verdict then
      verdict = 'OK'
      local fresh = position + #tokens - r.n
      for k, token in ipairs(tokens) do
        if position + k > r.n then
          if logprobs[k] and logprobs[k] ~= '' then
            redis.call('XADD', P .. 'log:' .. id, (position + k) .. '-0', 't', token, 'p', logprobs[k])
          else
            redis.call('XADD', P .. 'log:' .. id, (position + k) .. '-0', 't', token)
          end
        end
      end
      local left, rows = math.max(0, r.most - r.n), r.rows
      r.n = math.max(r.n, position + #tokens)
      if fresh > 0 then
        if rows > 0 then redis.call('HSET', P .. 'request:' .. id, 'rows', 0) end
        r.rows = 0
        spend(r, left, rows)
        if r.n == fresh then redis.call('HSETNX', P .. 'request:' .. id, 'first', NOW) end
        redis.call('HSET', P .. 'request:' .. id, 'n', r.n, 'moved', NOW)
        redis.call('ZADD', P .. 'running', 'XX', NOW, id)
      end
      local route = members(r.route)
      if ending ~= '' then
        finish(r, ending, meta)
      elseif #route > 1 and fresh > 0 then
        -- The next job goes to the first worker; without its inbox that worker is dead.
        local next_job = cmsgpack.pack({id, run, position, tokens})
        if not redis.call('XADD', P .. 'inbox:' .. route[1], 'NOMKSTREAM', '*', 'j', next_job) then rerun(r, 'no_inbox') end
      end
    end
  end
  answers[#answers + 1] = {verdict, r and r.n or 0}
end
for model, s in pairs(spent) do
  if s[1] ~= 0 then redis.call('HINCRBY', P .. 'load:' .. model, 'running_tokens', -s[1]) end
  if s[2] ~= 0 then redis.call('HINCRBY', P .. 'load:' .. model, 'running_rows', -s[2]) end
end
return answers
