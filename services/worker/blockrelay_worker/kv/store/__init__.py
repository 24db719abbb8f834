"""The page store: KV pages shared beyond one worker's pool, in shared memory, Redis or on a disk.

Pages are written after the step, and reused by the next run with the same first tokens. `record` is the format,
`tier` the interface of a tier, `file_tier` and `redis_tier` are the tiers, `store` has the two threads between tiers
and pool. Everything here may fail or be lost at any time: that costs recomputation, and never changes the text.
"""
