"""docs/http-api.md, from the application's own description, `/openapi.json`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blockrelay.settings import GatewaySettings
from blockrelay_gateway.api.openai.schemas import IGNORED, REFUSED
from blockrelay_gateway.app import create_app
from docs.generate.tables import table

_HEAD = """\
# HTTP API

For people who write clients and need every field.

Every route with its parameters, the fields of its body and its statuses, as a gateway's `/openapi.json` has them.
[API](api.md) shows how to use them; [errors](api.md#errors) says what the statuses mean. WebSockets: `/v1/infer/ws`,
`/ws` and `/` take bodies of `POST /v1/infer`.
"""
_FIELDS = ("field", "values", "meaning")


def page() -> str:
    """The whole page."""
    description = create_app(GatewaySettings()).openapi()
    schemas: dict[str, Any] = description["components"]["schemas"]
    parts = [_HEAD]
    bodies: dict[str, Any] = {}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts.append(f"\n## `{method.upper()} {path}`\n\n{operation.get('description', '').strip()}\n")
            if body := operation.get("requestBody"):
                (content,) = body["content"].values()
                name = content["schema"]["$ref"].rsplit("/", 1)[1]
                bodies[name] = schemas[name]
                parts.append(f"\nBody: [{name}](#{name.lower()}).\n")
            if parameters := operation.get("parameters"):
                rows = [
                    (f"`{p['name']}` ({p['in']})", _kind(p["schema"]), p.get("description", "")) for p in parameters
                ]
                parts.append(f"\n{table(_FIELDS, rows)}")
            parts.append(f"\nStatuses: {', '.join(sorted(operation['responses']))}.\n")
    for name in (
        "ChatMessage",
        "Tool",
        "Function",
        "ToolCall",
        "CalledFunction",
        "StreamOptions",
        "MaxSlowdown",
    ):  # parts of bodies
        bodies[name] = schemas[name]
    for name, schema in bodies.items():
        parts.append(f"\n## {name}\n\n{_body(schema)}")
    return "".join(parts)


def _body(schema: Mapping[str, Any]) -> str:
    required, fields = schema.get("required", ()), schema["properties"]
    refused = [name for name, field in fields.items() if name in REFUSED and "description" not in field]
    ignored = [name for name in fields if name in IGNORED]
    rows = [
        (f"`{name}`{' (required)' if name in required else ''}", _kind(field), field.get("description", ""))
        for name, field in fields.items()
        if name not in (*refused, *ignored)
    ]
    text = table(_FIELDS, rows)
    if refused:
        text += f"\nAccepted with their neutral values only, refused by name otherwise: {_named(refused)}.\n"
        text += f"\nAccepted and ignored; `x-blockrelay-ignored` of the answer names them: {_named(ignored)}.\n"
    return text


def _named(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _kind(schema: Mapping[str, Any]) -> str:
    """The values of a field in a few words; null means the default and is left out."""
    for either in ("anyOf", "oneOf"):
        if either in schema:
            return _either(_kind(part) for part in schema[either] if part.get("type") != "null")
    if "enum" in schema:
        return _either(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`".lower()
    if "$ref" in schema:
        return schema["$ref"].rsplit("/", 1)[1]
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    names = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
    return names.get(schema.get("type", ""), "object" if schema.get("type") == "object" else "any")


def _either(kinds: Iterable[str]) -> str:
    return " or ".join(kinds)
