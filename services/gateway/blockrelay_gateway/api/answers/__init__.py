"""The answers of all routes as pydantic models, for /openapi.json: each field, and an example of each answer.

Answers are built elsewhere, as plain dicts, and are not validated while they are sent. Tests compare them with these
models, which take no other field: what the document says is what clients get.
"""
