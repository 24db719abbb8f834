"""From token logs to readers: one copy of each log, many readers, answers and event streams."""
