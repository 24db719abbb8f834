-- What somebody needs to run a failed request off-line.
local MOST_DEAD_LETTERS = 200

local function dead_letter(r, reason, said)
  redis.call('XADD', P .. 'dead-letters', 'MAXLEN', MOST_DEAD_LETTERS, '*', 'request', r.id, 'committed', r.committed, 'reason', reason, 'error', said,
    'model', r.model, 'numerics', r.numerics, 'body', redis.call('HGET', P .. 'request:' .. r.id, 'body'))
end
