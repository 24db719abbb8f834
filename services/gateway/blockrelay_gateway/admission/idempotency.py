"""Names of the requests that one HTTP request becomes, and what tells its body from another. Pure.

Without an Idempotency-Key the first name is random. With one it derives from the tenant and the key, so a repeated POST
names the requests that it named before, on every gateway, without anything being stored beside them; their default
seeds derive from their names. Further prompts of one body are named after the first.
"""

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from secrets import token_hex

from pydantic import BaseModel

from blockrelay.errors import BadRequest
from blockrelay.protocol.encoding.request_ids import DIGITS

HEADER = "Idempotency-Key"
MAX_KEY = 255
#: How an answer is to be delivered or watched, not what it says: a retry may ask for it in another form.
_DELIVERY = {"stream", "stream_options", "return_token_ids", "id", "idempotency_key", "model", "trace"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """One prompt's request. `group` is the request of the first of several prompts, which counts them in `choices`."""

    request: str
    fingerprint: str = ""
    group: str = ""
    choices: int = 1


@dataclass(frozen=True, slots=True)
class Identity:
    """`base` is the request id of the first prompt; `fingerprint` names the body, "" without a key."""

    base: str
    fingerprint: str = ""

    def names(self, prompts: int = 1) -> list[Name]:
        """One for each prompt of the body."""
        if prompts == 1:
            return [Name(request=self.base, fingerprint=self.fingerprint)]
        return [
            Name(
                request=sibling(self.base, index),
                fingerprint=self.fingerprint,
                group=self.base,
                choices=1 if index else prompts,
            )
            for index in range(prompts)
        ]


def sibling(base: str, index: int) -> str:
    """The request id of prompt `index` of the body whose first prompt is `base`."""
    if index == 0:
        return base
    return f"req-{hashlib.sha256(f'{base}/{index}'.encode()).hexdigest()[:DIGITS]}"


def random_identity() -> Identity:
    """That of a body without a key."""
    return Identity(f"req-{token_hex(DIGITS // 2)}")


def identify(
    keys: Sequence[str], body: BaseModel, *, tenant: str, route: str, model: str, secret: str = ""
) -> Identity:
    """The identity of a body sent by `tenant` to `route` of a gateway for `model`; `keys` are those of its headers.

    Raises BadRequest for a key that is none, and for several.
    """
    if not keys:
        return random_identity()
    if len(keys) > 1:
        raise BadRequest(f"{HEADER} was sent more than once", param=HEADER)
    (key,) = keys
    if not 1 <= len(key) <= MAX_KEY or not key.isascii() or not key.isprintable():
        raise BadRequest(f"{HEADER} must be 1 to {MAX_KEY} printable ASCII characters", param=HEADER)
    named = b"\0".join(part.encode() for part in ("request", tenant, key))
    name = hmac.new(secret.encode(), named, hashlib.sha256).hexdigest()[:DIGITS]
    content = body.model_dump(exclude_none=True, exclude=_DELIVERY)
    said = json.dumps([route, model, content], sort_keys=True, separators=(",", ":"))
    return Identity(f"req-{name}", hashlib.sha256(said.encode()).hexdigest())
