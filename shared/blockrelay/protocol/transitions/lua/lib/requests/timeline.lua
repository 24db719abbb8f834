-- The request's timeline: `<ms>c<class>;` a claim, `<ms>t;` the first token, `<ms>r<reason>@<tokens>;` a re-run
-- (`@<tokens>=<id>`: it waits for a worker of this numerics id), `<ms>f<block>;` a fallback, behind it `<ms>w<first>-<last>,<reason>,<code>;` what it was, `<ms>d<block>;` one that was denied, `<ms>n<id>@<tokens>;` another
-- numerics id from here on (blockrelay.protocol.timeline reads it), in the order in which they happen, whatever the clock says.
-- Bounded: the oldest notes go first.
local MAX_NOTES = 1000
local function timeline_event(id, what)
  local notes = (redis.call('HGET', P .. 'request:' .. id, 'notes') or '') .. string.format('%d', NOW) .. what .. ';'
  if string.len(notes) > MAX_NOTES then notes = string.gsub(string.sub(notes, -MAX_NOTES), '^[^;]*;', '', 1) end
  redis.call('HSET', P .. 'request:' .. id, 'notes', notes)
end
