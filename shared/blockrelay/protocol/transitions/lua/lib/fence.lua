-- Refuses a cell whose protocol this release does not speak, or that has no number yet: its records mean something else.
-- SPOKEN is the cell's number; scripts behave as that protocol says.
local found = redis.call('GET', P .. 'protocol')
local SPOKEN = tonumber(found or '')
if not SPOKEN or SPOKEN < LOWEST_PROTOCOL or SPOKEN > PROTOCOL then
  local says = found and 'protocol ' .. found or 'no protocol yet'
  local ours = LOWEST_PROTOCOL < PROTOCOL and LOWEST_PROTOCOL .. ' to ' .. PROTOCOL or PROTOCOL
  return redis.error_reply('PROTOCOL the cell speaks ' .. says .. ', and this service speaks ' .. ours)
end
