"""What /openapi.json says of answers: a form for each, with an example that fits it."""

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from pydantic import BaseModel, TypeAdapter

from blockrelay_gateway.api.answers.operations import Version
from blockrelay_gateway.app import ROUTERS
from blockrelay_gateway.http import openapi
from tests.support.gateway.documented import Documented

ROUTES = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{min(route.methods)} {route.path}")
def test_every_answer_has_a_form_and_an_example_that_fits_it(route: APIRoute) -> None:
    described = {status: answer for status, answer in route.responses.items() if status in (200, 202)}
    if route.path.startswith("/metrics") or route.path.endswith("/events"):
        assert not any("model" in answer for answer in described.values()), "it is no JSON"
        return
    assert described
    for answer in described.values():
        for model in _models(answer["model"]):
            (example,) = model.model_config["json_schema_extra"]["examples"]  # pyright: ignore
            TypeAdapter(model).validate_python(example)


def _models(model: Any) -> list[type[BaseModel]]:
    """The models of a union, or of one."""
    return list(getattr(model, "__args__", (model,)))


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, {"version": 1}),
        (200, {}),
        (200, {"version": "1", "more": 1}),
        (418, {"version": "1"}),
        (404, {"error": 1}),
    ],
    ids=str,
)
def test_the_comparison_finds_what_is_not_documented(status: int, body: dict[str, Any]) -> None:
    app, answers = FastAPI(), [JSONResponse({"version": "1.2"}), JSONResponse(body, status_code=status)]

    async def version() -> JSONResponse:
        return answers.pop(0)

    app.get("/version", responses=openapi.ERRORS | openapi.answer(Version))(version)
    with TestClient(app) as client:
        client.event_hooks = dict(Documented(app).hooks())
        assert client.get("/version").status_code == 200
        with pytest.raises(AssertionError, match="/version answers"):
            client.get("/version")
