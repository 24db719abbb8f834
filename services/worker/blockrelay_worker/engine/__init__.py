"""The engine of one worker: takes jobs, runs batches through the executor, hands out commits."""
