-- A cell that speaks another protocol, or is being brought to one, is not ours to change: its records mean something else.
local spoken = redis.call('GET', P .. 'protocol')
if spoken and tonumber(spoken) ~= PROTOCOL then
  return redis.error_reply('PROTOCOL the cell speaks protocol ' .. spoken .. ', and this service speaks ' .. PROTOCOL)
end
