"""Pages beyond one worker's pool: written behind the step, found by whoever computes the same beginning next.

`record` is what a tier stores, `tier` what one can do, `shm` and `redis_tier` are those there are, `store` has the two
threads between them and the pool. Everything here may fail or be lost at any time: it costs recomputation, never text.
"""
