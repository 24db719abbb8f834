"""Routes that read their bodies themselves (`intake`): FastAPI would parse and validate on the event loop, and keep the
body, its JSON and the model of it until the last byte of the answer is sent."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Depends, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel


def described_by(model: type[BaseModel]) -> Any:
    """A dependency that says in /openapi.json what the body of a route is. Nothing ever calls it."""

    def body(body: BaseModel) -> None: ...

    body.__annotations__["body"] = model
    return Depends(body)


class OwnBodyRoute(APIRoute):
    """A route that is called with the request alone where a body is described; any other is FastAPI's."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return super().get_route_handler() if self.body_field is None else self.endpoint
