-- A cell that speaks another protocol than ours, or is being brought to one, is not ours to change: its records mean
-- something else. SPOKEN is the number in force, the highest that we speak or a lower one: scripts do what it says.
-- One without a number may be of release 0.1.0, which wrote none: who joins it looks first, and then writes ours.
local found = redis.call('GET', P .. 'protocol')
local SPOKEN = tonumber(found or '')
if not SPOKEN or SPOKEN < LOWEST_PROTOCOL or SPOKEN > PROTOCOL then
  local says = found and 'protocol ' .. found or 'no protocol yet'
  return redis.error_reply('PROTOCOL the cell speaks ' .. says .. ', and this service speaks '
    .. LOWEST_PROTOCOL .. ' to ' .. PROTOCOL)
end
