-- Dead letters: failed requests, with all that is needed to run them off-line.
local MOST_DEAD_LETTERS = 200

local function dead_letter(r, reason, message)
  redis.call('XADD', P .. 'dead-letters', 'MAXLEN', MOST_DEAD_LETTERS, '*', 'request', r.id, 'committed', r.committed,
    'reason', reason, 'error', message,
    'model', r.model, 'numerics', r.numerics, 'body', redis.call('HGET', P .. 'request:' .. r.id, 'body'))
end
