"""docs/http-api.md, from the application's own description, `/openapi.json`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from blockrelay.settings import GatewaySettings
from blockrelay_gateway.api.openai.schemas import IGNORED, REFUSED
from blockrelay_gateway.app import create_app
from docs.generate.tables import table

_HEAD = """\
# HTTP API

For people who write clients and need every field.

Every route with its parameters and statuses, and the fields of its body and answers, as a gateway's `/openapi.json` has
them; there are examples too. [API](api.md) shows how to use them; [errors](api.md#errors) says what the statuses mean.
WebSockets: `/v1/infer/ws`, `/ws` and `/` take bodies of `POST /v1/infer`.
"""
_FIELDS = ("field", "values", "meaning")


def page() -> str:
    """The whole page."""
    description = create_app(GatewaySettings()).openapi()
    schemas: dict[str, Any] = description["components"]["schemas"]
    parts, named = [_HEAD], list[str]()
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts.append(f"\n## `{method.upper()} {path}`\n\n{operation.get('description', '').strip()}\n")
            if body := operation.get("requestBody"):
                (content,) = body["content"].values()
                parts.append(f"\nBody: {_links(content['schema'], named)}.\n")
            if parameters := operation.get("parameters"):
                rows = [
                    (f"`{p['name']}` ({p['in']})", _kind(p["schema"]), p.get("description", "")) for p in parameters
                ]
                parts.append(f"\n{table(_FIELDS, rows)}")
            for status, label in (("200", "Answer"), ("202", "In the background")):
                content = operation["responses"].get(status, {}).get("content", {})
                if links := _links(content.get("application/json", {}).get("schema", {}), named):
                    parts.append(f"\n{label}: {links}.\n")
            parts.append(f"\nStatuses: {', '.join(sorted(operation['responses']))}.\n")
    for name in named:  # grows while it is read, by the parts of bodies and answers
        schema = schemas[name]
        named += [part for part in _refs(schema) if part not in named]
        parts.append(f"\n## {name}\n\n{_body(schema)}")
    return "".join(parts)


def _links(schema: Mapping[str, Any], named: list[str]) -> str:
    """Links to the schemas that `schema` consists of; adds their names to `named`."""
    refs = _refs(schema)
    named += [name for name in refs if name not in named]
    return _either(f"[{name}](#{name.lower()})" for name in refs)


def _refs(schema: object) -> list[str]:
    """The names of all schemas that `schema` refers to, each once."""
    if isinstance(schema, list):
        found = [name for part in cast(list[object], schema) for name in _refs(part)]
    elif isinstance(schema, dict):
        fields = cast(dict[str, object], schema)
        found = [str(fields["$ref"]).rsplit("/", 1)[1]] if "$ref" in fields else []
        found += [name for part in fields.values() for name in _refs(part)]
    else:
        found = []
    return list(dict.fromkeys(found))


def _body(schema: Mapping[str, Any]) -> str:
    required, fields = schema.get("required", ()), schema["properties"]
    refused = [name for name, field in fields.items() if name in REFUSED and "description" not in field]
    ignored = [name for name in fields if name in IGNORED]
    rows = [
        (
            f"`{name}`{' (required)' if name in required else ''}",
            _kind(field, null=name in required),
            field.get("description", ""),
        )
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


def _kind(schema: Mapping[str, Any], *, null: bool = False) -> str:
    """The values of a field in a few words. Without `null`, it means the default and is left out."""
    if schema.get("type") == "null":
        return "null"
    for either in ("anyOf", "oneOf"):
        if either in schema:
            return _either(_kind(part) for part in schema[either] if null or part.get("type") != "null")
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
