-- The log and the record of a request that has ended.
-- needs: requests/record

-- Fields that the record of an ended request keeps, beside `state`, `end` and `progress_ms`.
local REMAINING = {'v', 'committed', 'model', 'tenant', 'accepted_ms', 'claimed_ms', 'first_token_ms', 'reruns',
  'fingerprint', 'retention_s'}
-- Of these, fields that are dropped while the notes have the same time, and the pattern of that note.
local NOTED = {claimed_ms = '^%d+c', first_token_ms = '%d+t;'}
-- Fields that move into the terminal entry: they are long, and the hash stays compact without them.
local MOVING = {'body', 'notes', 'ran'}
-- A log of up to MOST_PACKED tokens is packed into its terminal entry, under the id of the last entry. If that has at most
-- MOST_MOVED bytes it moves into the record, in pieces of PIECE bytes, since Redis keeps a hash with short values in one
-- piece of memory. The packed log stays LINGER seconds for those who read it now.
local MOST_PACKED, MOST_MOVED, PIECE, LINGER = 1024, 6400, 64, 15

-- Writes the terminal entry from `named`, alternating names and values, without empty values. Returns the fields that
-- hold the log in the record; nil when the log must be kept.
local function close_log(r, named)
  local log, aside, last = P .. 'log:' .. r.id, P .. 'packing', (r.committed + 1) .. '-0'
  local fields = {}
  for i = 1, #named, 2 do
    if named[i + 1] and named[i + 1] ~= '' then
      fields[#fields + 1] = named[i]; fields[#fields + 1] = named[i + 1]
    end
  end
  if r.committed > MOST_PACKED then
    redis.call('XADD', log, last, unpack(fields))
    return nil
  end
  local tokens, logprobs = {}, {}
  for i, entry in ipairs(redis.call('XRANGE', log, '-', '+')) do
    tokens[i], logprobs[i] = tonumber(entry[2][2]), entry[2][3] == 'logprobs' and entry[2][4] or nil
  end
  if tokens[1] then
    fields[#fields + 1] = 'all'; fields[#fields + 1] = cmsgpack.pack(tokens)
  end
  if logprobs[1] then
    fields[#fields + 1] = 'logprobs'; fields[#fields + 1] = cmsgpack.pack(logprobs)
  end
  redis.call('XADD', aside, last, unpack(fields))
  redis.call('COPY', aside, log, 'REPLACE')  -- a new stream takes 4 KiB, a copy only what it needs
  redis.call('DEL', aside)
  local all = cmsgpack.pack(fields)
  if string.len(all) > MOST_MOVED then return nil end
  local pieces = {}
  for from = 1, string.len(all), PIECE do
    pieces[#pieces + 1] = #pieces / 2; pieces[#pieces + 1] = string.sub(all, from, from + PIECE - 1)
  end
  return pieces
end

-- Seconds that the end of a request can be read.
local function retention_of(r) return r.retention_s > 0 and r.retention_s or retention() end

-- Lists an ended request for FORGET, and drops ids at the front of the list whose records have expired.
local function list_ended(r)
  local list = P .. 'ended:' .. (r.retention_s > 0 and 'last' or 'first')
  for _, id in ipairs(redis.call('LRANGE', list, 0, 1)) do
    if redis.call('EXISTS', P .. 'request:' .. id) == 0 then redis.call('LREM', list, 1, id) end
  end
  redis.call('RPUSH', list, r.id)
  redis.call('EXPIRE', list, retention_of(r))
end
