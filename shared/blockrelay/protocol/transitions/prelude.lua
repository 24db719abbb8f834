-- Shared by every script. KEYS name one key of each family that the script touches: a caller without the rights to one
-- of them is refused before the first write, for Redis does not take back what a script wrote before it was refused.
-- The names of all keys of the cell are built from the hash tag of the first (one slot).
-- ARGV[1] is the retention in seconds of what a finished request leaves, while no scheduler has published the cell's.
-- Scripts validate first and write last: Redis does not roll back.
local P = string.match(KEYS[1], '^%b{}:')
-- What a scheduler has published for the cell, read when it is needed: COMMIT runs for every token.
local published
local function of_cell(field, default)
  published = published or redis.call('HMGET', P .. 'settings', 'retention_s', 'dead_after_ms')
  return tonumber(published[field] or default)
end
local function retention() return of_cell(1, ARGV[1]) end
local function dead_after(default) return of_cell(2, default) end
local time = redis.call('TIME')
local NOW = time[1] * 1000 + math.floor(time[2] / 1000)
-- Deaths at one log length: from the third on a request is tried alone, five deaths while it was end it.
local MAX_SOLO_DEATHS, SOLO_AFTER = 5, 3
-- Milliseconds that the second re-run at one log length waits, and that a later one waits at most.
local FIRST_DELAY, LONGEST_DELAY = 100, 5000
local MOST_DEAD_LETTERS = 200

local FIELDS = {'state', 'v', 'run', 'n', 'route', 'need', 'class', 'model', 'deadline', 'deaths', 'solo_deaths', 'deaths_n', 'tries',
  'missing', 'job', 'fallbacks', 'numerics', 'prompt', 'held', 'keep', 'tenant', 'most', 'rows', 'share', 'exact', 'result'}

local NUMBERS = {}
for _, f in ipairs({'v', 'n', 'need', 'deadline', 'deaths', 'solo_deaths', 'deaths_n', 'tries', 'missing', 'prompt', 'held', 'keep', 'most', 'rows', 'result'}) do
  NUMBERS[f] = true
end

-- The record of a request as a table, or nil: all of it, or `fields`, the first of which every record has. Numbers are
-- converted. Only a whole one may be ended or queued again.
local function load(id, fields)
  fields = fields or FIELDS
  local v = redis.call('HMGET', P .. 'request:' .. id, unpack(fields))
  if not v[1] then return nil end
  local r = {id = id}
  for i, f in ipairs(fields) do
    if NUMBERS[f] then r[f] = tonumber(v[i] or '') or 0 else r[f] = v[i] or '' end
  end
  return r
end

local function members(route)
  local t = {}
  for w in string.gmatch(route, '[^,]+') do t[#t + 1] = w end
  return t
end

-- Give back what a run holds on its route's workers and tell them (a hint: BEAT finds what a lost note leaves behind).
-- Keeps I4.
-- Idempotent: only a member of on:<worker> has a reservation.
local function release(r)
  for _, w in ipairs(members(r.route)) do
    redis.call('XADD', P .. 'inbox:' .. w, 'NOMKSTREAM', '*', 'd', cmsgpack.pack({r.id, r.run}))
    if redis.call('SREM', P .. 'on:' .. w, r.id) == 1 and r.held > 0
      and redis.call('EXISTS', P .. 'worker:' .. w) == 1 then
      redis.call('HINCRBY', P .. 'worker:' .. w, 'reserved', -r.held)
    end
    if redis.call('GET', P .. 'trying:' .. w) == r.id then redis.call('DEL', P .. 'trying:' .. w) end
  end
end

-- The books of a model (`load:<model>`, I6): what its unfinished requests still cost, queued and running: prompt rows (and
-- rows of committed tokens) that nobody has computed, tokens that may follow, KV pages.
-- `sign` 1 adds what r weighs in its present state, -1 takes it away.
local function weigh(r, sign)
  local key, left = P .. 'load:' .. r.model, r.most - r.n
  if r.rows > 0 then redis.call('HINCRBY', key, r.state .. '_rows', sign * r.rows) end
  if left > 0 then redis.call('HINCRBY', key, r.state .. '_tokens', sign * left) end
end

local function books(model)
  local v = redis.call('HMGET', P .. 'load:' .. model, 'queued_rows', 'queued_tokens', 'running_rows', 'running_tokens', 'pages')
  return {queued_rows = tonumber(v[1] or 0), queued_tokens = tonumber(v[2] or 0), running_rows = tonumber(v[3] or 0),
    running_tokens = tonumber(v[4] or 0), pages = tonumber(v[5] or 0)}
end

-- The numerics id under which a log goes on: the last of `a+b@17`, where b has computed what stands behind 17 tokens.
local function id_of(numerics) return string.match(numerics, '([^+@]+)@?%d*$') end

-- Where re-runs wait: for any worker, or for one of the numerics id that has computed their tokens.
local function reruns_stream(r) return P .. 'reruns:' .. r.model .. ':' .. r.class end
local function pinned_stream(r) return P .. 'pinned:' .. r.model .. ':' .. r.class .. ':' .. id_of(r.numerics) end

local function unqueue(r)
  if r.job == 'delayed' then
    redis.call('ZREM', P .. 'delayed', r.id)
  elseif r.job == 'queue' then
    redis.call('ZREM', P .. 'queue:' .. r.model .. ':' .. r.class, r.id)
    redis.call('ZREM', P .. 'due:' .. r.model .. ':' .. r.class, r.id)
  elseif r.job ~= '' then
    local stream, entry = string.match(r.job, '^(%a+) (.+)$')
    redis.call('XDEL', stream == 'pinned' and pinned_stream(r) or reruns_stream(r), entry)
  end
end

-- The fallback events of a request that ends now, as JSON, each with its `success`: whether the CPU computed what the GPU
-- had failed at. It did when something was committed behind the failure, or when the end itself is a good one.
local function judged_fallbacks(r, reason)
  if r.fallbacks == '' then return '' end
  local good = reason == 'stop' or reason == 'length' or reason == 'tensor'
  local list = cjson.decode(r.fallbacks)
  for _, event in ipairs(list) do
    event.success, event.at = good or r.n > (event.at or 0), nil
  end
  return cjson.encode(list)
end

-- What a record still says when its request has ended, beside `state`, `end` and `moved`.
local REMAINING = {'v', 'n', 'model', 'tenant', 'accepted', 'claimed', 'first', 'reruns', 'numerics', 'fp', 'keep'}
-- What moves into the terminal entry: of any length, so it would make the hash a large one.
local MOVING = {'body', 'notes'}
-- A log of up to so many tokens is packed (it takes a moment), and moves into the record if it has so many bytes at most: in
-- pieces, since Redis keeps a hash without longer values in one piece of memory. What a reader finds in its place is the
-- same: the log stays for a while for those who read it now, as one entry under the id of the last.
local MOST_PACKED, MOST_MOVED, PIECE, LINGER = 1024, 6400, 64, 15

-- Write the terminal entry: `said`, pairs of names and values, without what is empty. The fields that the record gets for
-- it; nil when the log must be kept.
local function close_log(r, said)
  local log, aside, last = P .. 'log:' .. r.id, P .. 'packing', (r.n + 1) .. '-0'
  local fields = {}
  for i = 1, #said, 2 do
    if said[i + 1] and said[i + 1] ~= '' then
      fields[#fields + 1] = said[i]; fields[#fields + 1] = said[i + 1]
    end
  end
  if r.n > MOST_PACKED then
    redis.call('XADD', log, last, unpack(fields))
    return nil
  end
  local tokens, logprobs = {}, {}
  for i, entry in ipairs(redis.call('XRANGE', log, '-', '+')) do
    tokens[i], logprobs[i] = tonumber(entry[2][2]), entry[2][4]
  end
  if tokens[1] then
    fields[#fields + 1] = 'all'; fields[#fields + 1] = cmsgpack.pack(tokens)
  end
  if logprobs[1] then
    fields[#fields + 1] = 'logprobs'; fields[#fields + 1] = cmsgpack.pack(logprobs)
  end
  redis.call('XADD', aside, last, unpack(fields))
  redis.call('COPY', aside, log, 'REPLACE')  -- a new stream takes 4 KiB, a copy what it needs
  redis.call('DEL', aside)
  local all = cmsgpack.pack(fields)
  if string.len(all) > MOST_MOVED then return nil end
  local pieces = {}
  for from = 1, string.len(all), PIECE do
    pieces[#pieces + 1] = #pieces / 2; pieces[#pieces + 1] = string.sub(all, from, from + PIECE - 1)
  end
  return pieces
end

-- A request has ended: one more that may be forgotten early. Names of what its retention has taken leave at the other end.
local function list_ended(r)
  local list, keep = P .. 'ended:' .. (r.keep > 0 and 'last' or 'first'), r.keep > 0 and r.keep or retention()
  for _, id in ipairs(redis.call('LRANGE', list, 0, 1)) do
    if redis.call('EXISTS', P .. 'request:' .. id) == 0 then redis.call('LREM', list, 1, id) end
  end
  redis.call('RPUSH', list, r.id)
  redis.call('EXPIRE', list, keep)
end

-- The books of tensor results (I6), which lie on the payload Redis: `results` says until when each may be there, and
-- `result-bytes` how large it is and whose, with the sums: of all under '', of a tenant under ' ' and its name.
local function add_result(tenant, bytes)
  for _, sum in ipairs({'', ' ' .. tenant}) do
    if redis.call('HINCRBY', P .. 'result-bytes', sum, bytes) == 0 then redis.call('HDEL', P .. 'result-bytes', sum) end
  end
end

local function strike_result(id)
  local bytes, tenant = string.match(redis.call('HGET', P .. 'result-bytes', id) or '', '^(%d+) (.*)$')
  if bytes then
    add_result(tenant, -bytes)
    redis.call('HDEL', P .. 'result-bytes', id)
  end
  redis.call('ZREM', P .. 'results', id)
end

-- Promised. A promise under the same id is of a request that is begun anew.
local function book_result(id, tenant, bytes)
  strike_result(id)
  redis.call('ZADD', P .. 'results', '+inf', id)
  redis.call('HSET', P .. 'result-bytes', id, bytes .. ' ' .. tenant)
  add_result(tenant, bytes)
end

-- Its request has ended. What a worker has begun, one may store; nobody will store what nobody has claimed.
local function end_result(id, claimed)
  if claimed then redis.call('ZADD', P .. 'results', 'XX', NOW + RESULT_MS, id) else strike_result(id) end
end

-- Keeps I2, I5.
-- Terminal entry, absorbing; what nobody needs any more goes. `meta` is a JSON object (error, execution times) or ''.
local function finish(r, reason, meta)
  local record = P .. 'request:' .. r.id
  release(r)
  unqueue(r)
  weigh(r, -1)
  redis.call('HINCRBY', P .. 'load:' .. r.model, 'pages', -r.need)
  redis.call('SREM', P .. 'of:' .. r.tenant, r.id)
  if r.job == 'queue' then  -- its tenant has not had its share of it
    local cost, share = string.match(r.share, '^(%d+) (.+)$')
    redis.call('ZADD', P .. 'shares:' .. r.model .. ':' .. r.class, 'XX', 'INCR', -cost, share)
    local bucket = P .. 'bucket:' .. r.tenant
    if redis.call('EXISTS', bucket) == 1 then redis.call('HINCRBYFLOAT', bucket, 'level', r.prompt + r.most) end
  end
  local said = {'end', reason, 'meta', meta, 'fallbacks', judged_fallbacks(r, reason), 'numerics', r.numerics}
  for i, value in ipairs(redis.call('HMGET', record, unpack(MOVING))) do
    said[#said + 1] = MOVING[i]; said[#said + 1] = value
  end
  local pieces = close_log(r, said)
  if r.result > 0 then end_result(r.id, redis.call('HEXISTS', record, 'claimed') == 1) end
  local left = {'state', 'done', 'end', reason, 'moved', NOW}
  for i, value in ipairs(redis.call('HMGET', record, unpack(REMAINING))) do
    if value and value ~= '' then left[#left + 1] = REMAINING[i]; left[#left + 1] = value end
  end
  redis.call('DEL', record)
  redis.call('HSET', record, unpack(left))
  if pieces then redis.call('HSET', record, unpack(pieces)) end
  redis.call('ZREM', P .. 'running', r.id)
  local keep = r.keep > 0 and r.keep or retention()
  redis.call('EXPIRE', record, keep)
  list_ended(r)
  redis.call('EXPIRE', P .. 'log:' .. r.id, pieces and math.min(keep, LINGER) or keep)
  r.state = 'done'
end

-- The request's timeline: `<ms>c<class>;` a claim, `<ms>t;` the first token, `<ms>r<reason>@<tokens>;` a re-run
-- (`@<tokens>=<id>`: it waits for a worker of this numerics id), `<ms>f<block>;` a fallback, `<ms>n<id>@<tokens>;` another
-- numerics id from here on (blockrelay.protocol.timeline reads it), in the order in which they happen, whatever the clock says.
-- Bounded: the oldest notes go first.
local MAX_NOTES = 1000
local function note(id, what)
  local notes = (redis.call('HGET', P .. 'request:' .. id, 'notes') or '') .. string.format('%d', NOW) .. what .. ';'
  if string.len(notes) > MAX_NOTES then notes = string.gsub(string.sub(notes, -MAX_NOTES), '^[^;]*;', '', 1) end
  redis.call('HSET', P .. 'request:' .. id, 'notes', notes)
end

-- For any worker.
local function enqueue(r)
  local entry = redis.call('XADD', reruns_stream(r), '*', 'r', r.id)
  redis.call('HSET', P .. 'request:' .. r.id, 'job', 'reruns ' .. entry)
end

-- Tokens that there are decide the numerics id: their request waits for a worker of it, apart, where it is in nobody's way,
-- and MIGRATE watches whether one is left.
local function pinned(r) return r.n > 0 and r.numerics ~= '' end
local function pin(r)
  local entry = redis.call('XADD', pinned_stream(r), '*', 'r', r.id)
  redis.call('HSET', P .. 'request:' .. r.id, 'job', 'pinned ' .. entry)
  redis.call('HSETNX', P .. 'numerics:' .. r.model, r.class .. ':' .. id_of(r.numerics), '')
end

local function enqueue_later(r, delay)
  redis.call('ZADD', P .. 'delayed', NOW + delay, r.id)
  redis.call('HSET', P .. 'request:' .. r.id, 'job', 'delayed')
end

-- Put re-runs whose delay is over onto their stream; also those due later than any delay lasts: the clock went back.
local function promote()
  for _, range in ipairs({{'-inf', NOW}, {'(' .. (NOW + LONGEST_DELAY), '+inf'}}) do
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'delayed', range[1], range[2], 'LIMIT', 0, 64)) do
      redis.call('ZREM', P .. 'delayed', id)
      local r = load(id)
      if r and r.state == 'queued' and r.job == 'delayed' then
        if pinned(r) then pin(r) else enqueue(r) end
      end
    end
  end
end

-- Keep what somebody needs to run a failed request off-line.
local function bury(r, why, said)
  redis.call('XADD', P .. 'dead-letters', 'MAXLEN', MOST_DEAD_LETTERS, '*', 'r', r.id, 'n', r.n, 'why', why, 'error', said,
    'model', r.model, 'numerics', r.numerics, 'body', redis.call('HGET', P .. 'request:' .. r.id, 'body'))
end

-- `at`: the log's length at that moment.
local function add_fallback(r, block, reason)
  local list = r.fallbacks ~= '' and cjson.decode(r.fallbacks) or {}
  list[#list + 1] = {block_id = block, from = 'GPU', to = 'CPU', reason = reason, at = r.n}
  r.fallbacks = cjson.encode(list)
end

-- Keeps I3, I7.
-- End the current run and queue the request once more. `block` is where a GPU failed, or nil: with one, the class becomes
-- cpu and no worker of the numerics id is waited for. Re-runs and deaths count only at an unchanged log length; the second
-- re-run waits, and each one after it twice as long. `tried` is the request that a dead worker tried alone, or nil: with
-- it nobody else is to blame.
local function rerun(r, reason, block, tried)
  local set = {'state', 'queued', 'run', '', 'route', '', 'moved', NOW, 'why', reason}
  if reason == 'missing_pages' then
    set[#set + 1] = 'missing'; set[#set + 1] = r.missing + 1
  end
  if r.deaths_n ~= r.n then r.deaths, r.solo_deaths, r.tries = 0, 0, 0 end
  local innocent = reason == 'drain' or (reason == 'death' and tried and tried ~= r.id)
  if reason == 'death' and not innocent then
    r.deaths = r.deaths + 1
    if tried then r.solo_deaths = r.solo_deaths + 1 end
    if r.solo_deaths >= MAX_SOLO_DEATHS then
      local said = 'the request ended its worker ' .. r.deaths .. ' times at the same position and is kept as a dead letter'
      bury(r, 'poison', said)
      finish(r, 'error', cjson.encode({error = said, code = 'poison'}))
      return
    end
  end
  if not innocent then r.tries = r.tries + 1 end
  for _, f in ipairs({'deaths', 'solo_deaths', 'tries'}) do set[#set + 1] = f; set[#set + 1] = r[f] end
  set[#set + 1] = 'deaths_n'; set[#set + 1] = r.n
  release(r)
  weigh(r, -1)
  r.state, r.rows = 'queued', r.prompt + r.n
  set[#set + 1] = 'rows'; set[#set + 1] = r.rows
  weigh(r, 1)
  if block then
    add_fallback(r, block, reason == 'death' and 'worker_death' or reason)
    r.class = 'cpu'
    for _, v in ipairs({'class', 'cpu', 'fallbacks', r.fallbacks}) do set[#set + 1] = v end
  end
  redis.call('HSET', P .. 'request:' .. r.id, unpack(set))
  redis.call('HINCRBY', P .. 'request:' .. r.id, 'reruns', 1)
  local waits = pinned(r) and not block
  note(r.id, 'r' .. reason .. '@' .. r.n .. (waits and '=' .. id_of(r.numerics) or ''))
  if block then note(r.id, 'f' .. block) end
  redis.call('ZADD', P .. 'running', 'XX', NOW, r.id)
  if r.tries > 1 and not innocent then
    enqueue_later(r, math.min(LONGEST_DELAY, FIRST_DELAY * 2 ^ (r.tries - 2)))
  elseif waits then
    pin(r)
  else
    enqueue(r)
  end
end
