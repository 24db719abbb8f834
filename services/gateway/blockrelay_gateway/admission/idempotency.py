"""Makes the request ids of one HTTP request, and the fingerprint of its body. Pure, but for random ids.

Without an Idempotency-Key the first id is random. With one it derives from the tenant, the key and the secret of the
settings. So a repeated POST has the same ids on every gateway with that secret, and nothing else is stored for it.
Default seeds derive from the ids. The ids of further choices of one body derive from the first.
"""

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from secrets import token_hex

from pydantic import BaseModel

from blockrelay.errors import BadRequest
from blockrelay.protocol.encoding.request_ids import DIGITS, sibling

HEADER = "Idempotency-Key"
MAX_KEY = 255
#: Fields that are not part of the fingerprint: they change the form of an answer, and a retry may want another form.
_DELIVERY = {"stream", "stream_options", "return_token_ids", "id", "idempotency_key", "model", "trace"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """The id of one choice's request, and its place among the choices of a body."""

    request_id: str
    fingerprint: str = ""
    group: str = ""
    """Request id of the first of several choices; "" for a single choice."""
    choices: int = 1
    """Number of choices of the body, in the request of the first one; 1 in the others."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of one HTTP request."""

    base: str
    """Request id of the first choice."""
    fingerprint: str = ""
    """SHA-256 of route, model and body (but for fields of its delivery), in hex; "" without an Idempotency-Key."""

    def names(self, choices: int = 1) -> list[Name]:
        """The names of the requests, one for each choice of the body."""
        if choices == 1:
            return [Name(request_id=self.base, fingerprint=self.fingerprint)]
        return [
            Name(
                request_id=sibling(self.base, index),
                fingerprint=self.fingerprint,
                group=self.base,
                choices=1 if index else choices,
            )
            for index in range(choices)
        ]


def random_identity() -> Identity:
    """The identity of a body without a key: a random request id."""
    return Identity(f"req-{token_hex(DIGITS // 2)}")


def identify(
    keys: Sequence[str], body: BaseModel, *, tenant: str, route: str, model: str, secret: str = ""
) -> Identity:
    """The identity of a body that `tenant` sent to `route` of a gateway for `model`.

    `keys` are the values of its Idempotency-Key header; without one the identity is random. `secret` keeps others from
    computing request ids. Raises BadRequest for a key that is not 1 to 255 printable ASCII characters, and for several
    keys.
    """
    if not keys:
        return random_identity()
    base = keyed_request_id(keys, tenant=tenant, secret=secret)
    content = body.model_dump(exclude_none=True, exclude=_DELIVERY)
    canonical = json.dumps([route, model, content], sort_keys=True, separators=(",", ":"))
    return Identity(base, hashlib.sha256(canonical.encode()).hexdigest())


def keyed_request_id(keys: Sequence[str], *, tenant: str, secret: str) -> str:
    """The request id that derives from the values `keys` of an Idempotency-Key header, of which there is at least one.

    Raises BadRequest for a key that is not 1 to 255 printable ASCII characters, and for several keys.
    """
    if len(keys) > 1:
        raise BadRequest(f"{HEADER} was sent more than once", param=HEADER)
    (key,) = keys
    if not 1 <= len(key) <= MAX_KEY or not key.isascii() or not key.isprintable():
        raise BadRequest(f"{HEADER} must be 1 to {MAX_KEY} printable ASCII characters", param=HEADER)
    named = b"\0".join(part.encode() for part in ("request", tenant, key))
    return f"req-{hmac.new(secret.encode(), named, hashlib.sha256).hexdigest()[:DIGITS]}"
