-- PLAN: publishes a plan by compare-and-set on the epoch and on the hash of its inputs, so that two schedulers agree.
-- Arguments: model, replaces (epoch), inputs (their hash), class, plan (JSON)
-- Answer: the epoch in force afterwards
local key = P .. 'plan:' .. ARGS.model
local epoch = tonumber(redis.call('HGET', key, 'epoch') or '0')
if epoch ~= ARGS.replaces or redis.call('HGET', key, 'inputs') == ARGS.inputs then return epoch end
redis.call('HSET', key, 'v', SPOKEN, 'epoch', epoch + 1, 'inputs', ARGS.inputs, 'class', ARGS.class, 'plan', ARGS.plan)
return epoch + 1
