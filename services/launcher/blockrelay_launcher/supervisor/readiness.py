"""Asks the gateway whether a token can be produced."""

import http.client
import json
from typing import Any


def why_not_ready(host: str, port: int) -> str:
    """Empty when `/readyz` says 200, else the reason it gives (or that nobody listens). Takes a second at most."""
    connection = http.client.HTTPConnection(host, port, timeout=1)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        body = answer.read(65536)
    except (OSError, http.client.HTTPException) as error:
        return f"the gateway does not answer yet ({error})"
    finally:
        connection.close()
    return "" if answer.status == 200 else _reasons(body)


def _reasons(body: bytes) -> str:
    try:
        content: Any = json.loads(body)
        return "; ".join(map(str, content["reasons"]))
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
