"""Routes that read their bodies themselves, with `intake`.

FastAPI would parse and validate on the event loop, and keep the body, its JSON and the model of it until the last byte
of the answer is sent.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Depends, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel


def described_by(model: type[BaseModel]) -> Any:
    """Returns a dependency that describes the body of a route as `model` in /openapi.json.

    It goes into the `dependencies` of an OwnBodyRoute, and is never called.
    """

    def body(body: BaseModel) -> None: ...

    body.__annotations__["body"] = model
    return Depends(body)


class OwnBodyRoute(APIRoute):
    """A route whose endpoint reads the body itself, if it has one (`described_by`); else a usual route of FastAPI.

    With a body, the endpoint is a coroutine function that gets the Request alone and returns a Response. FastAPI then
    passes no path parameters, runs no dependencies (not even the router's), and converts no return value.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the endpoint itself, or FastAPI's handler for a route without a body."""
        return super().get_route_handler() if self.body_field is None else self.endpoint
