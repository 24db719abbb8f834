"""Requests of clients that are not installed here, made by curl."""

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from tests.clients.table import WORKS


def outcome(row: Mapping[str, Any], url: str, model: str) -> str:
    """What became of a row's request: as the cases of other clients say it."""
    method, _, path = row["request"].partition(" ")
    arguments = ["--head"] if method == "HEAD" else ["--include", "--request", method]
    for name, value in row.get("headers", {}).items():
        arguments += ["--header", f"{name}: {value}"]
    if "body" in row:
        arguments += ["--json", json.dumps({"model": model, **row["body"]})]
    done = subprocess.run(
        ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", "100", *arguments, url + path],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return done.stderr.strip()
    head, _, body = done.stdout.replace("\r\n", "\n").partition("\n\n")
    status = int(head.split()[1])
    if status >= 400:
        return f"{status} {_param(body)}".rstrip()
    if "text/event-stream" in head.lower():
        return _of_stream(body)
    return _of_json(body, row["has"]) if "has" in row else WORKS


def _param(body: str) -> str:
    try:
        return json.loads(body)["error"]["param"] or ""
    except (ValueError, KeyError, TypeError):
        return ""


def _of_stream(body: str) -> str:
    """A benchmark tool reads lines: each is empty, or `data: ` and JSON."""
    *events, last = [line for line in body.splitlines() if line]
    for line in events:
        try:
            if "error" in json.loads(line.removeprefix("data: ")):
                return line
        except ValueError:
            return f"this line is not `data: ` and JSON: {line}"
    return WORKS if events and last == "data: [DONE]" else f"the stream ends with {last}"


def _of_json(body: str, path: str) -> str:
    found: Any = json.loads(body)
    try:
        for part in path.split("."):
            found = found[int(part)] if part.isdigit() else found[part]
    except (KeyError, IndexError, TypeError):
        return f"the answer has no {path}"
    return WORKS if found or found == 0 else f"{path} of the answer is {found!r}"
