"""Web pages of other sites and names that are not ours: refused before anything is read, queued or told."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from blockrelay.auth.api_keys import Tenant, add_key
from blockrelay.auth.web_origins import Rules
from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import ForeignOrigin, UnknownHost, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.settings import GatewaySettings
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.app import create_app
from blockrelay_gateway.http.authentication import PROBES
from blockrelay_gateway.http.origins import Origins
from tests.support.gateway.foreign_pages import EVIL, PROMPT, WAYS, Way
from tests.support.gateway.played import PlayedWorker, RunningGateway, answering, running_gateway, serving, settings_for
from tests.support.gateway.sockets import connected
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until

FRIEND = "https://chat.example.com"


@pytest.fixture
def cells() -> list[Keys]:
    """The keys of the cells of this module's gateways."""
    return [Keys(cell) for cell in ("t", "guarded", "keyed", "open")]


@pytest.fixture(scope="module")
def guarded(folder: BlockFolder, shared_redis: RedisServer) -> Iterator[RunningGateway]:
    """A gateway with allowed origins, alone in its cell."""
    with running_gateway(settings_for(folder, shared_redis, "guarded", cors_origins=FRIEND)) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(folder: BlockFolder, shared_redis: RedisServer) -> Iterator[RunningGateway]:
    """It knows one other site."""
    settings = settings_for(folder, shared_redis, "t", cors_origins=f"{FRIEND}, app://obsidian.md")
    with running_gateway(settings) as running:
        yield running


@pytest.fixture(scope="module")
def keyed(
    folder: BlockFolder, shared_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """It demands a key, which all that `http` sends have."""
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    key = add_key(file, Tenant(name="ada"))
    with running_gateway(settings_for(folder, shared_redis, "keyed", api_keys=file, cors_origins="*")) as running:
        running.http.headers["authorization"] = f"Bearer {key}"
        yield running


@pytest.fixture(scope="module")
def open_to_all(folder: BlockFolder, shared_redis: RedisServer) -> Iterator[RunningGateway]:
    """The same without the rule."""
    app = create_app(settings_for(folder, shared_redis, "open"))
    app.user_middleware = [one for one in app.user_middleware if one.cls is not Origins]  # pyright: ignore
    with serving(app) as running:
        yield running


def port_of(gateway: RunningGateway) -> str:
    return gateway.url.rpartition(":")[2]


def send(gateway: RunningGateway, way: Way) -> tuple[int, str]:
    """The status of the answer and its body; a socket that opens is 101, and its body is the first answer."""
    port, key = port_of(gateway), gateway.http.headers.get("authorization")
    headers = {**way.headers, "host": (way.host or "127.0.0.1:{port}").format(port=port)}
    pairs = [*headers.items(), *(("origin", origin.format(port=port)) for origin in way.origins)]
    pairs += [("authorization", key)] if key else []
    if way.socket:
        return open_socket(gateway, way, pairs)
    with closing(http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)) as connection:
        connection.putrequest(way.method, way.path, skip_host=True, skip_accept_encoding=True)
        for name, value in pairs:
            connection.putheader(name, value)
        connection.putheader("content-length", str(len(way.body)))
        connection.endheaders(way.body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def open_socket(gateway: RunningGateway, way: Way, pairs: list[tuple[str, str]]) -> tuple[int, str]:
    host = dict(pairs)["host"]
    address = (gateway.url if way.host is None else f"http://{host}").replace("http", "ws", 1) + way.path
    others = [(name, value) for name, value in pairs if name not in ("host", "origin")]
    origin: Any = dict(pairs).get("origin")
    try:
        with connect(address, sock=connected(gateway), origin=origin, additional_headers=others) as socket:
            socket.send(way.body.decode())
            return 101, str(socket.recv(timeout=20))
    except InvalidStatus as refused:
        return refused.response.status_code, refused.response.body.decode()


@pytest.fixture
def untouched(client: redis.Redis) -> Iterator[None]:
    """Nothing of what a test sends gets as far as ACCEPT."""
    yield
    left = {key.decode().split(":")[1] for key in client.scan_iter("{guarded}:*")}  # pyright: ignore
    assert left <= {"gateway", "wake", "protocol"}, "what a gateway writes for itself"


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", WAYS)
def test_what_pages_of_other_sites_send_is_refused(guarded: RunningGateway, name: str) -> None:
    status, body = send(guarded, WAYS[name])
    assert status == WAYS[name].status, body
    code, setting = {403: ("foreign_origin", "--cors-origins"), 421: ("unknown_host", "--allowed-hosts")}[status]
    error = json.loads(body)["error"]
    assert error["code"] == code and setting in error["message"], "it says what to do"


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.works])
def test_without_the_rule_it_would_work(open_to_all: RunningGateway, name: str) -> None:
    status, body = send(open_to_all, WAYS[name])
    assert status in (101, 200, 202), body
    assert "error" not in body or status == 200


def test_most_of_the_ways_would_work() -> None:
    assert sum(way.works for way in WAYS.values()) * 2 > len(WAYS)


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.status == 421 or "null" in way.origins])
def test_a_key_opens_neither_names_nor_pages_of_nobody(keyed: RunningGateway, name: str) -> None:
    assert send(keyed, WAYS[name])[0] == WAYS[name].status


@pytest.mark.usefixtures("untouched")
def test_a_key_alone_lets_no_page_in(folder: BlockFolder, shared_redis: RedisServer, tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.json", Tenant(name="ada"))
    settings = settings_for(folder, shared_redis, "guarded", api_keys=tmp_path / "keys.json")
    with running_gateway(settings) as gateway:
        gateway.http.headers["authorization"] = f"Bearer {key}"
        assert [send(gateway, way)[0] for way in WAYS.values()] == [way.status for way in WAYS.values()]


@pytest.mark.usefixtures("untouched")
def test_the_body_of_a_foreign_page_is_not_waited_for(guarded: RunningGateway) -> None:
    with connected(guarded) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\norigin: {EVIL}\r\ncontent-length: 1000000\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(12) == b"HTTP/1.1 403"


def test_who_is_no_page_is_let_in(gateway: RunningGateway, worker: PlayedWorker) -> None:
    """curl's content type is that of a form."""
    port = port_of(gateway)
    for headers in ({"content-type": "application/x-www-form-urlencoded"}, {}):
        for host in ("localhost", "LOCALHOST.:{port}", "127.0.0.1:{port}", "10.1.2.3", "[::1]:{port}", "127.1:{port}"):
            way = Way(origins=(), headers=headers, host=host.format(port=port))
            assert send(gateway, way)[0] == 202, host
    assert send(gateway, Way(path="/v1/infer/ws", socket=True, origins=()))[0] == 101


def test_our_own_pages_are_let_in(gateway: RunningGateway, worker: PlayedWorker) -> None:
    for host in ("localhost:{port}", "127.0.0.1:{port}", "[::1]:{port}"):
        assert send(gateway, Way(host=host, origins=(f"http://{host}",)))[0] == 202
    behind_a_proxy = Way(host="192.0.2.7", origins=("https://192.0.2.7",))
    assert send(gateway, behind_a_proxy)[0] == 202
    own = Way(path="/v1/infer/ws", socket=True, host="localhost:{port}", origins=("http://localhost:{port}",))
    assert send(gateway, own)[0] == 101


def test_probes_and_scrapes_pass_under_any_name(gateway: RunningGateway, worker: PlayedWorker) -> None:
    wait_until(lambda: gateway.http.get("/readyz").status_code == 200, "the gateway has seen the worker")
    for path, status in [*((probe, 200) for probe in PROBES), ("/v1/models", 421)]:
        answer = gateway.http.get(path, headers={"host": "gateway.cell.svc:8000"})
        assert answer.status_code == status, path


def test_a_listed_site_streams_a_chat(gateway: RunningGateway, worker: PlayedWorker, tokenizer: Tokenizer) -> None:
    said = tokenizer.encode(" has two apples.", add_special_tokens=False)
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    asked = gateway.http.options(
        "/v1/chat/completions",
        headers={"origin": FRIEND, **asks, "access-control-request-private-network": "true"},
    )
    assert asked.status_code == 204
    allowed = {name: value for name, value in asked.headers.items() if name.startswith("access-control")}
    assert allowed == {
        "access-control-allow-origin": FRIEND,
        "access-control-allow-methods": "OPTIONS, POST",
        "access-control-allow-headers": "authorization, content-type",
        "access-control-allow-private-network": "true",
        "access-control-max-age": "600",
    }
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with answering(worker, lambda _: (said, "stop")):
        answer = gateway.http.post("/v1/chat/completions", json=body, headers={"origin": FRIEND})
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.headers["access-control-allow-origin"] == FRIEND and "origin" in answer.headers["vary"]
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    assert send(gateway, Way(path="/ws", socket=True, origins=("app://obsidian.md",)))[0] == 101


def test_a_listed_site_may_read_refusals(gateway: RunningGateway, keyed: RunningGateway, worker: PlayedWorker) -> None:
    wrong = gateway.http.post("/v1/completions", json={"nonsense": 1}, headers={"origin": FRIEND})
    assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (400, FRIEND)
    stranger = {"origin": FRIEND, "authorization": "Bearer no"}
    unknown = keyed.http.post("/v1/completions", json={"prompt": "x"}, headers=stranger)
    assert (unknown.status_code, unknown.headers["access-control-allow-origin"]) == (401, FRIEND)


def test_preflights_name_what_each_route_takes(gateway: RunningGateway) -> None:
    def taken(path: str) -> str:
        headers = {"origin": FRIEND, "access-control-request-method": "GET"}
        return gateway.http.options(path, headers=headers).headers["access-control-allow-methods"]

    assert taken("/v1/requests/req-1") == "DELETE, GET, HEAD, OPTIONS"
    assert taken("/v1/models") == "GET, HEAD, OPTIONS"
    assert taken("/nowhere") == ""


def test_with_keys_every_site_may_be_let_in(keyed: RunningGateway, worker: PlayedWorker) -> None:
    asks = {"origin": EVIL, "access-control-request-method": "POST", "access-control-request-private-network": "true"}
    asked = keyed.http.options("/v1/completions", headers=asks)
    assert asked.status_code == 204, "a preflight brings no key"
    assert asked.headers["access-control-allow-origin"] == EVIL
    assert "access-control-allow-private-network" not in asked.headers, "only for a site that somebody named"
    assert keyed.http.post("/v1/completions", content=PROMPT, headers={"origin": EVIL}).status_code == 202


def test_a_refused_request_is_counted(gateway: RunningGateway) -> None:
    before = gateway.metric("blockrelay_admission_rejections_total", status="403")
    send(gateway, Way())
    assert gateway.metric("blockrelay_admission_rejections_total", status="403") == before + 1


class TestRules:
    """The decisions alone."""

    def rules(self, **settings: Any) -> Rules:
        return Rules.of(GatewaySettings(**settings))

    @pytest.mark.parametrize(
        ("settings", "host", "good"),
        [
            ({}, "localhost:8000", True),
            ({}, "example.com", False),
            ({}, "", True),
            ({}, "0", True),
            ({}, "127.0.0.1.", True),
            ({}, "[::ffff:7f00:1]:1", True),
            ({}, "[evil]", False),
            ({}, "user@localhost", False),
            ({}, "localhost:8000:1", False),
            ({"host": "::1"}, "example.com", False),
            ({"host": "localhost"}, "example.com", False),
            ({"host": "0.0.0.0"}, "example.com", True),
            ({"host": "box.lan"}, "example.com", True),
            ({"host": "0.0.0.0", "allowed_hosts": "box.lan, box"}, "BOX.lan:8000", True),
            ({"host": "0.0.0.0", "allowed_hosts": "box.lan"}, "example.com", False),
            ({"host": "0.0.0.0", "allowed_hosts": "box.lan"}, "10.0.0.7:8000", True),
            ({"host": "box.lan", "allowed_hosts": "other"}, "box.lan", True),
            ({"allowed_hosts": "*"}, "example.com", True),
        ],
    )
    def test_names(self, settings: dict[str, Any], host: str, good: bool) -> None:
        rules = self.rules(**settings)
        if good:
            rules.check_host([host])
        else:
            with pytest.raises(UnknownHost):
                rules.check_host([host])

    @pytest.mark.parametrize(
        ("listed", "origin", "host", "guest"),
        [
            ("", "http://example.com", "example.com", None),
            ("", "http://example.com", "example.com:80", None),
            ("", "https://example.com", "example.com:443", None),
            ("https://A.example:443/", "https://a.example", "localhost", "https://a.example"),
            ("http://a.example:8080", "http://a.example:8080", "localhost", "http://a.example:8080"),
        ],
    )
    def test_origins_that_pass(self, listed: str, origin: str, host: str, guest: str | None) -> None:
        assert self.rules(cors_origins=listed).check_origin([origin], [host]) == guest

    @pytest.mark.parametrize(
        ("origin", "host"),
        [
            ("https://example.com", "example.com:80"),
            ("http://example.com:8000", "example.com"),
            ("http://a.example.", "a.example"),
            ("null", "null"),
            ("app://localhost", "localhost"),
            ("https://b.example", "localhost"),
        ],
    )
    def test_origins_that_do_not(self, origin: str, host: str) -> None:
        with pytest.raises(ForeignOrigin):
            self.rules(cors_origins="https://a.example").check_origin([origin], [host])

    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("cors_origins", "*"),
            ("cors_origins", "null"),
            ("cors_origins", "example.com"),
            ("cors_origins", "https://example.com/chat"),
            ("cors_origins", "https://*.example.com, https://a b"),
            ("allowed_hosts", "example.com:8000"),
            ("allowed_hosts", "https://example.com"),
        ],
    )
    def test_what_cannot_be_meant_is_refused_at_the_start(self, setting: str, value: str) -> None:
        with pytest.raises(UsageError, match=f"BLOCKRELAY_{setting.upper()}"):
            self.rules(**{setting: value})
