-- The cell that a script works on: key prefix P, arguments ARGS, Redis' time NOW in ms, settings. Every script has this part.
-- KEYS has one key of each family that the script touches: Redis refuses a caller without the rights to one of them before
-- the first write. (It does not undo what a script wrote before it was refused.) All keys of the cell are built from the
-- hash tag of the first, so they are in one slot.
-- ARGV[1] has the arguments by name, packed with msgpack. The numbers of blockrelay.protocol.constants stand before this part.
-- Scripts validate first and write last: Redis does not roll back.
local P = string.match(KEYS[1], '^%b{}:')
local ARGS = cmsgpack.unpack(ARGV[1])
local time = redis.call('TIME')
local NOW = time[1] * 1000 + math.floor(time[2] / 1000)

-- A setting that a scheduler published for the cell. Read only when needed, since COMMIT runs for every token.
local settings
local function setting(index, default)
  settings = settings or redis.call('HMGET', P .. 'settings', 'retention_s', 'dead_after_ms')
  return tonumber(settings[index] or default)
end
-- Seconds that a finished request can be read; milliseconds without a heartbeat after which a worker is dead.
local function retention() return setting(1, RETENTION_S) end
local function dead_after() return setting(2, DEAD_AFTER_MS) end
