-- ACCEPT: check limits, write the record, queue the first job. Idempotent by request id.
-- With an Idempotency-Key the id derives from the key, so that another body may come under a known id: the fingerprint of
-- the body that made the record decides. A request that ended because nobody read it ('abandoned') counts as forgotten.
-- ARGV: retention, id, model, need (pages), max in flight, deadline (ms, 0 = none), body, prompt tokens,
--   fingerprint ('' without a key), seconds to keep it after its end (0 = retention), tenant,
--   [session, step, fingerprint of the step, length, new tokens]
-- Answers: OK ms | EXISTS state | OTHER | BUSY in-flight | TOO_LARGE pages | STEP expected-step | REPEAT request-id
local id, model, need, limit, deadline, body = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local prompt = tonumber(ARGV[8])
local known = redis.call('HMGET', P .. 'request:' .. id, 'state', 'fp', 'abandoned')
if known[1] and not known[3] then
  if (known[2] or '') ~= ARGV[9] then return {'OTHER'} end
  return {'EXISTS', known[1]}
end

local session, append
if ARGV[12] then
  session = P .. 'session:' .. ARGV[12]
  local step = tonumber(redis.call('HGET', session, 'step') or '0')
  local length = tonumber(redis.call('HGET', session, 'length') or '0')
  local wanted = tonumber(ARGV[13])
  if wanted == step and step > 0 and redis.call('HGET', session, 'fp') == ARGV[14] then
    local previous = redis.call('HGET', session, 'request')
    local ended = redis.call('HGET', P .. 'request:' .. previous, 'end')
    local there = redis.call('EXISTS', P .. 'request:' .. previous) == 1
    if there and (not ended or ended == 'tensor') then return {'REPEAT', previous} end
  elseif wanted == step + 1 and length == tonumber(ARGV[15]) then
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

if known[1] then redis.call('DEL', P .. 'request:' .. id, P .. 'log:' .. id) end
local class = redis.call('HGET', P .. 'plan:' .. model, 'class') or 'cpu'
redis.call('HSET', P .. 'request:' .. id, 'state', 'queued', 'model', model, 'class', class, 'need', need, 'prompt', prompt,
  'deadline', deadline, 'body', body, 'n', 0, 'run', '', 'route', '', 'accepted', NOW, 'moved', NOW)
if ARGV[11] ~= '' then redis.call('HSET', P .. 'request:' .. id, 'tenant', ARGV[11]) end
if ARGV[9] ~= '' then redis.call('HSET', P .. 'request:' .. id, 'fp', ARGV[9], 'keep', ARGV[10]) end
redis.call('ZADD', P .. 'running', NOW, id)
if session then
  redis.call('HSET', session, 'step', ARGV[13], 'fp', ARGV[14], 'request', id)
  if append then
    local tokens = (redis.call('HGET', session, 'tokens') or '') .. ARGV[16]
    redis.call('HSET', session, 'tokens', tokens, 'length', string.len(tokens) / 4)
  end
  redis.call('EXPIRE', session, RETENTION)
end
enqueue({id = id, model = model, class = class}, 'jobs')
return {'OK', string.format('%d', NOW)}
