"""The Lua scripts that change requests, workers and plans in Redis, and typed calls of them.

`lua/` has one script for each transition; `source` assembles their text; `calls` has the arguments and answers.
"""
