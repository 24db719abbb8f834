-- A cell that speaks another protocol, or is being brought to one, is not ours to change: its records mean something else.
-- One without a number may be of release 0.1.0, which wrote none: who joins it looks first, and then writes ours.
local spoken = redis.call('GET', P .. 'protocol')
if not spoken or tonumber(spoken) ~= PROTOCOL then
  local says = spoken and 'protocol ' .. spoken or 'no protocol yet'
  return redis.error_reply('PROTOCOL the cell speaks ' .. says .. ', and this service speaks ' .. PROTOCOL)
end
