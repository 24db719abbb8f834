-- PLAN: publish a plan by compare-and-set on the epoch and on the hash of its inputs, so that two schedulers agree.
-- ARGV: retention, model, epoch it replaces, hash of the inputs, class, plan (JSON)
-- Answer: the epoch in force afterwards
local key = P .. 'plan:' .. ARGV[2]
local epoch = tonumber(redis.call('HGET', key, 'epoch') or '0')
if epoch ~= tonumber(ARGV[3]) or redis.call('HGET', key, 'inputs') == ARGV[4] then return epoch end
redis.call('HSET', key, 'v', PROTOCOL, 'epoch', epoch + 1, 'inputs', ARGV[4], 'class', ARGV[5], 'plan', ARGV[6])
return epoch + 1
