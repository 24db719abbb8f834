"""What web pages of other sites can make a browser send to a gateway on its visitor's machine, as data.

`{port}` is the gateway's. Each way is refused with `status`; `works` says what comes of it when nobody refuses: the
request is queued, or what it asks for is told.
"""

from dataclasses import dataclass, field

#: JSON that a gateway without the rule would queue, whatever content type it claims.
PROMPT = b'{"prompt": "x", "max_tokens": 4, "background": true}'
CHAT = b'{"messages": [{"role": "user", "content": "x"}], "background": true}'
EVIL = "http://evil.example"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """`origins` are sent as so many headers; `host` None: where the gateway listens. A `socket` sends `body` as its
    first message."""

    path: str = "/v1/completions"
    method: str = "POST"
    origins: tuple[str, ...] = (EVIL,)
    host: str | None = None
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "text/plain;charset=UTF-8"})
    body: bytes = PROMPT
    socket: bool = False
    status: int = 403
    works: bool = True


def read(path: str, **more: object) -> Way:
    return Way(**{"method": "GET", "path": path, "body": b"", "headers": {}, **more})  # pyright: ignore[reportArgumentType]


def opened(**more: object) -> Way:
    return Way(**{"method": "GET", "path": "/v1/infer/ws", "headers": {}, "socket": True, **more})  # pyright: ignore[reportArgumentType]


REBOUND = "evil.example:{port}"
WAYS = {
    "fetch with mode no-cors": Way(),
    "navigator.sendBeacon": Way(path="/v1/chat/completions", body=CHAT),
    "a form of text": Way(
        headers={"content-type": "text/plain"}, body=b'{"prompt": "x", "background": true, "user": "="}\r\n'
    ),
    "a form": Way(headers={"content-type": "application/x-www-form-urlencoded"}),
    "a form with files": Way(
        headers={"content-type": "multipart/form-data; boundary=b"},
        body=b'--b\r\ncontent-disposition: form-data; name="prompt"\r\n\r\nx\r\n--b--\r\n',
        works=False,
    ),
    "without a content type": Way(headers={}),
    "JSON, as a plug-in sends it": Way(headers={"content-type": "application/json"}),
    "a preflight": Way(
        method="OPTIONS",
        headers={"access-control-request-method": "POST", "access-control-request-headers": "content-type"},
        body=b"",
        works=False,
    ),
    "the pipeline's own form": Way(path="/v1/infer"),
    "a sandboxed frame, or a file": Way(origins=("null",)),
    "a page on TLS": Way(origins=("https://evil.example",)),
    "an extension": Way(origins=("chrome-extension://abcdefghijklmnopabcdefghijklmnop",)),
    "another port of this machine": Way(origins=("http://127.0.0.1:3000",)),
    "another name of this machine": Way(origins=("http://localhost:3000",)),
    "this address without the port": Way(origins=("http://127.0.0.1",)),
    "this address, and more": Way(origins=("http://127.0.0.1:{port}.evil.example",)),
    "this address as a user": Way(origins=("http://127.0.0.1:{port}@evil.example",)),
    "another scheme": Way(origins=("ftp://127.0.0.1:{port}",)),
    "no origin at all": Way(origins=("",)),
    "our origin, and another": Way(origins=("http://127.0.0.1:{port}", EVIL)),
    "two in one": Way(origins=(f"http://127.0.0.1:{{port}}, {EVIL}",)),
    "reading the models": read("/v1/models"),
    "reading the interface": read("/openapi.json"),
    "reading the metrics": read("/metrics"),
    "reading a request": read("/v1/requests/req-" + "0" * 24, works=False),
    "reading its events": read("/v1/requests/req-" + "0" * 24 + "/events", works=False),
    "ending a request": Way(
        method="DELETE", path="/v1/requests/req-" + "0" * 24, headers={}, body=b"", works=False
    ),
    "a socket": opened(),
    "a socket of the short name": opened(path="/ws"),
    "a socket without a path": opened(path="/"),
    "a socket of a sandboxed frame": opened(origins=("null",)),
    "a socket of a page on TLS": opened(origins=("https://evil.example",)),
    "a rebound name": Way(host=REBOUND, origins=("http://" + REBOUND,), status=421),
    "a rebound name that reads": read("/v1/models", host=REBOUND, origins=(), status=421),
    "a rebound name that opens a socket": opened(host=REBOUND, origins=("http://" + REBOUND,), status=421),
    "a rebound name on the usual port": Way(host="evil.example", origins=(EVIL,), status=421),
    "a name that looks like ours": Way(
        host="localhost.evil.example:{port}", origins=("http://localhost.evil.example:{port}",), status=421
    ),
    "a name that looks like an address": Way(
        host="127.0.0.1.evil.example:{port}", origins=("http://127.0.0.1.evil.example:{port}",), status=421
    ),
}  # fmt: skip
