-- What somebody needs to run a failed request off-line.
local MOST_DEAD_LETTERS = 200

local function dead_letter(r, why, said)
  redis.call('XADD', P .. 'dead-letters', 'MAXLEN', MOST_DEAD_LETTERS, '*', 'r', r.id, 'n', r.n, 'why', why, 'error', said,
    'model', r.model, 'numerics', r.numerics, 'body', redis.call('HGET', P .. 'request:' .. r.id, 'body'))
end
