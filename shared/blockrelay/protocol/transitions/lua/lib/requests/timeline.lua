-- The timeline of a request: notes in its record, in the order in which they happened, whatever the clock says.
-- `<ms>c<class>;` a claim. `<ms>t;` the first token. `<ms>r<reason>@<tokens>;` a re-run (`@<tokens>=<id>`: it waits for a
-- worker of this numerics id). `<ms>f<block>;` a fallback, followed by its details `<ms>w<first>-<last>,<reason>,<code>;`.
-- `<ms>d<block>;` a fallback that was denied. `<ms>n<id>@<tokens>;` another numerics id from here on.
-- blockrelay.protocol.records.timeline reads it. The oldest notes are dropped beyond MAX_NOTES characters.
local MAX_NOTES = 1000
local function timeline_event(id, what)
  local notes = (redis.call('HGET', P .. 'request:' .. id, 'notes') or '') .. string.format('%d', NOW) .. what .. ';'
  if string.len(notes) > MAX_NOTES then notes = string.gsub(string.sub(notes, -MAX_NOTES), '^[^;]*;', '', 1) end
  redis.call('HSET', P .. 'request:' .. id, 'notes', notes)
end
