-- ACCEPT: check limits, write the record, queue the first job. Idempotent by request id.
-- ARGV: retention, id, model, need (pages), max in flight, deadline (ms, 0 = none), body, prompt tokens,
--   [session, step, fingerprint, length, new tokens]
-- Answers: OK | EXISTS state | BUSY in-flight | TOO_LARGE pages | STEP expected-step | REPEAT request-id
local id, model, need, limit, deadline, body = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local prompt = tonumber(ARGV[8])
local state = redis.call('HGET', P .. 'request:' .. id, 'state')
if state then return {'EXISTS', state} end

local session, append
if ARGV[9] then
  session = P .. 'session:' .. ARGV[9]
  local step = tonumber(redis.call('HGET', session, 'step') or '0')
  local length = tonumber(redis.call('HGET', session, 'length') or '0')
  local wanted = tonumber(ARGV[10])
  if wanted == step and step > 0 and redis.call('HGET', session, 'fp') == ARGV[11] then
    local previous = redis.call('HGET', session, 'request')
    local ended = redis.call('HGET', P .. 'request:' .. previous, 'end')
    local known = redis.call('EXISTS', P .. 'request:' .. previous) == 1
    if known and (not ended or ended == 'tensor') then return {'REPEAT', previous} end
  elseif wanted == step + 1 and length == tonumber(ARGV[12]) then
    append = true
  else
    return {'STEP', step + 1}
  end
end

local in_flight = redis.call('ZCARD', P .. 'running')
if in_flight >= limit then return {'BUSY', in_flight} end

-- What fits no pool even alone would wait for ever. Without workers nothing is known: it may wait.
local room = {}
for _, w in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '+inf', 'LIMIT', 0, 256)) do
  local v = redis.call('HMGET', P .. 'worker:' .. w, 'split', 'stage', 'pages', 'model')
  if v[4] == model and v[3] then
    local stage = v[1] .. '/' .. v[2]
    room[stage] = math.max(room[stage] or 0, tonumber(v[3]))
  end
end
for _, pages in pairs(room) do
  if pages < need then return {'TOO_LARGE', pages} end
end

local class = redis.call('HGET', P .. 'plan:' .. model, 'class') or 'cpu'
redis.call('HSET', P .. 'request:' .. id, 'state', 'queued', 'model', model, 'class', class, 'need', need, 'prompt', prompt,
  'deadline', deadline, 'body', body, 'n', 0, 'run', '', 'route', '', 'accepted', NOW, 'moved', NOW)
redis.call('ZADD', P .. 'running', NOW, id)
if session then
  redis.call('HSET', session, 'step', ARGV[10], 'fp', ARGV[11], 'request', id)
  if append then
    local tokens = (redis.call('HGET', session, 'tokens') or '') .. ARGV[13]
    redis.call('HSET', session, 'tokens', tokens, 'length', string.len(tokens) / 4)
  end
  redis.call('EXPIRE', session, RETENTION)
end
enqueue({id = id, model = model, class = class}, 'jobs')
return {'OK'}
