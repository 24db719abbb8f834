-- The log of a request that has ended, and what its record keeps.
-- needs: requests/record

-- What a record still says when its request has ended, beside `state`, `end` and `progress_ms`.
local REMAINING = {'v', 'committed', 'model', 'tenant', 'accepted_ms', 'claimed_ms', 'first_token_ms', 'reruns',
  'numerics', 'fingerprint', 'retention_s'}
-- Of these, what its notes say too, as long as they have it.
local NOTED = {claimed_ms = '^%d+c', first_token_ms = '%d+t;'}
-- What moves into the terminal entry: of any length, so it would make the hash a large one.
local MOVING = {'body', 'notes'}
-- A log of up to so many tokens is packed (it takes a moment), and moves into the record if it has so many bytes at most: in
-- pieces, since Redis keeps a hash without longer values in one piece of memory. What a reader finds in its place is the
-- same: the log stays for a while for those who read it now, as one entry under the id of the last.
local MOST_PACKED, MOST_MOVED, PIECE, LINGER = 1024, 6400, 64, 15

-- Write the terminal entry: `said`, pairs of names and values, without what is empty. The fields that the record gets for
-- it; nil when the log must be kept.
local function close_log(r, said)
  local log, aside, last = P .. 'log:' .. r.id, P .. 'packing', (r.committed + 1) .. '-0'
  local fields = {}
  for i = 1, #said, 2 do
    if said[i + 1] and said[i + 1] ~= '' then
      fields[#fields + 1] = said[i]; fields[#fields + 1] = said[i + 1]
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

-- Seconds that an end can be read.
local function retention_of(r) return r.retention_s > 0 and r.retention_s or retention() end

-- A request has ended: one more that may be forgotten early. Names of what its retention has taken leave at the other end.
local function list_ended(r)
  local list = P .. 'ended:' .. (r.retention_s > 0 and 'last' or 'first')
  for _, id in ipairs(redis.call('LRANGE', list, 0, 1)) do
    if redis.call('EXISTS', P .. 'request:' .. id) == 0 then redis.call('LREM', list, 1, id) end
  end
  redis.call('RPUSH', list, r.id)
  redis.call('EXPIRE', list, retention_of(r))
end
