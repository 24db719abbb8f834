-- The cell that a script works on. Every script is preceded by this.
-- KEYS name one key of each family that the script touches: a caller without the rights to one of them is refused before
-- the first write, for Redis does not take back what a script wrote before it was refused. The names of all keys of the
-- cell are built from the hash tag of the first (one slot).
-- ARGV[1] holds the arguments by name, packed with msgpack. Before this stand the numbers of blockrelay.protocol.constants.
-- Scripts validate first and write last: Redis does not roll back.
local P = string.match(KEYS[1], '^%b{}:')
local ARGS = cmsgpack.unpack(ARGV[1])
local time = redis.call('TIME')
local NOW = time[1] * 1000 + math.floor(time[2] / 1000)

-- What a scheduler has published for the cell, read when it is needed: COMMIT runs for every token.
local settings
local function setting(index, default)
  settings = settings or redis.call('HMGET', P .. 'settings', 'retention_s', 'dead_after_ms')
  return tonumber(settings[index] or default)
end
-- Seconds that a finished request can be read; milliseconds without a beat that make a worker dead.
local function retention() return setting(1, RETENTION_S) end
local function dead_after() return setting(2, DEAD_AFTER_MS) end
