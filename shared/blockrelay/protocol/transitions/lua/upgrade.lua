-- UPGRADE: raises the protocol number of the cell, once every service there speaks the higher one. Nothing else changes.
-- Arguments: from (the number that the cell speaks), to
-- Answer: 1, or 0 when the cell speaks another number by now
if SPOKEN ~= ARGS.from then return 0 end
redis.call('SET', P .. 'protocol', ARGS.to)
return 1
