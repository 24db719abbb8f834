"""Compares the answers that a test gets from a gateway with what its /openapi.json says of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.routing import Match

#: Larger answers are not read by the comparison: tests look at how they are sent.
MOST_BYTES = 1 << 20
#: The status of an answer to a client that has left; no document names it.
GONE = 499


class Documented:
    """The documented answers of an application. `check` is a hook for responses of an httpx client."""

    def __init__(self, app: FastAPI) -> None:
        self._routes: Sequence[APIRoute] = [route for route in app.routes if isinstance(route, APIRoute)]
        self._models: dict[tuple[str, int], TypeAdapter[Any]] = {}

    def hooks(self) -> Mapping[str, list[Any]]:
        """`event_hooks` of a client."""
        return {"response": [self.check]}

    def check(self, response: httpx.Response) -> None:
        """Fails unless the answer has a documented status, and a JSON body in the form that is documented for it."""
        route, status = self._route_of(response.request), response.status_code
        is_json = response.headers.get("content-type", "").startswith("application/json")
        if route is None or status == GONE or not is_json:
            return
        documented = route.responses.get(status)
        assert documented is not None, f"{route.path} answers {status}, which /openapi.json does not name"
        if int(response.headers.get("content-length", 0)) > MOST_BYTES or "model" not in documented:
            return
        model = self._models.setdefault((route.unique_id, status), TypeAdapter(documented["model"]))
        try:
            model.validate_python(response.read() and response.json())
        except ValidationError as error:
            raise AssertionError(f"{route.path} answers {status} in another form: {error}") from error

    def _route_of(self, request: httpx.Request) -> APIRoute | None:
        scope = {"type": "http", "path": request.url.path, "method": request.method}
        return next((route for route in self._routes if route.matches(scope)[0] is Match.FULL), None)
