"""What balancers, proxies and clients ask of every route before they send a prompt."""

import json
from collections.abc import Iterator

import httpx
import pytest
from starlette.routing import Route
from websockets.sync.client import connect

from blockrelay import __version__
from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.transitions import calls
from blockrelay_gateway.app import ROUTERS
from tests.support.gateway.played import PlayedWorker, RunningGateway, running_gateway, settings_for
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until

HEALTH = ("/health", "/v1/health", "/ping")
ROUTES = [route for router in ROUTERS for route in router.routes if isinstance(route, Route)]
#: Paths that are GET, with something for what they name.
READ = sorted({route.path.replace("{name:path}", "tiny") for route in ROUTES if "GET" in (route.methods or ())})


@pytest.fixture(scope="module")
def below(folder: BlockFolder, shared_redis: RedisServer) -> Iterator[RunningGateway]:
    """Behind a proxy that publishes it as /llm."""
    with running_gateway(settings_for(folder, shared_redis, "below", root_path="/llm")) as running:
        yield running


@pytest.mark.parametrize("path", HEALTH)
def test_health_is_503_exactly_while_no_token_could_be_produced(
    gateway: RunningGateway, worker: PlayedWorker, path: str
) -> None:
    wait_until(lambda: gateway.http.get(path).status_code == 200, "what was known is not fresh any more")
    assert gateway.http.get(path).json() == {"status": "ok"}
    for name in worker.names:
        worker.scripts.run(calls.dead(name, silent_s=0))
    for probe in (path, "/readyz"):
        wait_until(lambda at=probe: gateway.http.get(at).status_code == 503, "what was known is not fresh any more")
    assert gateway.http.get(path).json() == {"status": "not ready"}, "no reasons: anybody may ask"
    assert gateway.http.get("/livez").status_code == 200


def test_it_says_what_it_is(gateway: RunningGateway) -> None:
    assert gateway.http.get("/version").json() == {"version": __version__}
    assert gateway.http.get("/").json() == {"name": "blockrelay", "version": __version__, "model": "tiny"}


@pytest.mark.parametrize("path", READ)
def test_what_can_be_read_takes_head_and_options(gateway: RunningGateway, worker: PlayedWorker, path: str) -> None:
    streams = path == "/v1/status/events"
    head = gateway.http.head(path)
    assert head.content == b"" and head.status_code != 405
    if streams:
        assert head.headers["content-type"].startswith("text/event-stream")
    elif not path.startswith("/metrics"):  # which change
        whole = gateway.http.get(path)
        assert (head.status_code, head.headers["content-length"]) == (whole.status_code, str(len(whole.content)))
    options = gateway.http.options(path)
    assert options.status_code == 204 and {"GET", "HEAD", "OPTIONS"} <= set(options.headers["allow"].split(", "))


def test_what_is_posted_says_so(gateway: RunningGateway) -> None:
    assert gateway.http.options("/v1/completions").headers["allow"] == "OPTIONS, POST"
    assert gateway.http.options("/openapi.json").status_code == 204
    assert gateway.http.get("/openapi.json").json()["info"]["version"] == __version__
    assert gateway.http.head("/v1/completions").status_code == 405
    assert gateway.http.options("/v1/nothing").status_code == 404


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_proxy_may_cut_its_prefix_off_or_leave_it(below: RunningGateway, prefix: str) -> None:
    assert below.http.get(f"{prefix}/v1/models").json()["data"][0]["id"] == "tiny"
    assert below.http.get(f"{prefix}/livez").status_code == 200
    assert below.http.get(f"{prefix}/").json()["name"] == "blockrelay"
    refused = below.http.post(f"{prefix}/v1/completions", json={"prompt": []})
    assert refused.status_code == 400
    assert below.http.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert below.http.get("/llmx/v1/models").status_code == 404
    with connect(below.url.replace("http", "ws") + prefix) as socket:
        socket.send('{"id": 1, "prompt": []}')
        assert json.loads(socket.recv(timeout=20))["id"] == 1


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_redirect_stays_below_the_prefix(below: RunningGateway, gateway: RunningGateway, prefix: str) -> None:
    redirected = below.http.get(f"{prefix}/version/?a=1")
    assert (redirected.status_code, redirected.headers["location"]) == (307, "/llm/version?a=1")
    assert below.http.get(redirected.headers["location"]).status_code == 200
    assert gateway.http.get("/version/").headers["location"] == "/version", "no scheme that a proxy for TLS has not"


def test_a_page_behind_a_proxy_is_our_own(gateway: RunningGateway) -> None:
    page = {"origin": "https://chat.example"}
    assert gateway.http.get("/v1/models", headers=page).status_code == 403
    for name in ("host", "x-forwarded-host"):
        told = gateway.http.get("/v1/models", headers={**page, name: "chat.example"})
        assert told.status_code == (421 if name == "host" else 200), "names are listed by --allowed-hosts"


@pytest.mark.parametrize(("sent", "back"), [("abc-1", "abc-1"), ("a b", None), ("x" * 300, None)])
def test_a_clients_own_request_id_comes_back_beside_ours(gateway: RunningGateway, sent: str, back: str | None) -> None:
    answer = gateway.http.get("/v1/models", headers={"x-request-id": sent})
    assert answer.headers.get("x-client-request-id") == back
    refused = httpx.get(f"{gateway.url}/v1/nothing", headers={"x-request-id": sent})
    assert refused.headers.get("x-client-request-id") == back


def test_models_say_how_long_a_context_is_by_all_names(gateway: RunningGateway, folder: BlockFolder) -> None:
    (model,) = gateway.http.get("/v1/models").json()["data"]
    longest = folder.model.max_position
    assert (model["max_model_len"], model["context_length"], model["meta"]) == (
        longest, longest, {"n_ctx_train": longest}
    )  # fmt: skip
