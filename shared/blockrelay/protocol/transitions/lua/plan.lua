-- PLAN: publishes a plan by compare-and-set on the epoch and on the hash of its inputs, so that two schedulers agree.
-- Also publishes how much slower CPUs are predicted to be than GPUs, which changes without an epoch and is read by RERUN and DEAD.
-- Arguments: model, replaces (epoch), inputs (their hash), class, plan (JSON); or model and slowdowns alone (JSON: by the first
--   and last block of a stage, `3-5`, how many times as long it takes on a CPU)
-- Answer: the epoch in force afterwards
local key = P .. 'plan:' .. ARGS.model
local epoch = tonumber(redis.call('HGET', key, 'epoch') or '0')
if ARGS.slowdowns then
  redis.call('HSET', key, 'slowdowns', ARGS.slowdowns)
  return epoch
end
if epoch ~= ARGS.replaces or redis.call('HGET', key, 'inputs') == ARGS.inputs then return epoch end
redis.call('HSET', key, 'v', SPOKEN, 'epoch', epoch + 1, 'inputs', ARGS.inputs, 'class', ARGS.class, 'plan', ARGS.plan)
return epoch + 1
