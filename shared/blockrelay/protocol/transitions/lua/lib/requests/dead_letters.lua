-- Dead letters: failed requests, with all that is needed to run them off-line.
local MOST_DEAD_LETTERS = 200
-- Tokens of the log that a dead letter keeps, the first ones, to compare a replay with.
local MOST_LETTER_TOKENS = 1024

local function dead_letter(r, reason, message)
  local tokens, known = {}, redis.call('HMGET', P .. 'request:' .. r.id, 'body', 'ran')
  for _, entry in ipairs(redis.call('XRANGE', P .. 'log:' .. r.id, '-', '+', 'COUNT', MOST_LETTER_TOKENS)) do
    tokens[#tokens + 1] = tonumber(entry[2][2])
  end
  redis.call('XADD', P .. 'dead-letters', 'MAXLEN', MOST_DEAD_LETTERS, '*', 'request', r.id, 'committed', r.committed,
    'reason', reason, 'error', message,
    'model', r.model, 'numerics', r.numerics, 'body', known[1], 'ran', known[2] or '', 'tokens', cmsgpack.pack(tokens))
end
