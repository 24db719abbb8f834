"""Reads records and token logs of requests from Redis, and checks if a client may see them."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from blockrelay.errors import NotFound, ServiceUnavailable
from blockrelay.protocol.number import NUMBERS, is_spoken, number_of
from blockrelay.protocol.records.ended import Log, whole_log
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.streaming.cell_links import CellLinks


def check_number(record: Mapping[bytes, bytes], what: str) -> None:
    """Raises ServiceUnavailable for a record of another protocol, whose fields mean something else; `what` names it.

    An empty record, of a request that does not exist, passes.
    """
    if record and not is_spoken(number := number_of(record.get(b"v"))):
        raise ServiceUnavailable(
            f"{what} is of protocol {number} of the cell, and this gateway speaks {NUMBERS}: it can be read by a "
            "gateway of another release"
        )


class Records:
    """Reads the requests of one cell for a gateway that serves its model. Its coroutines raise RedisTrouble."""

    def __init__(self, links: CellLinks) -> None:
        self._client, self._keys, self._model = links.client, links.keys, links.model
        self._replicated = links.replicated

    async def read(self, request_id: str, *, whole: bool = True) -> tuple[dict[bytes, bytes], Log]:
        """Reads a request's record and log in one transaction; both are empty if the request does not exist.

        Without `whole` only the last entry of the log is read. The log of an ended request may be packed into its
        record. With or without `whole`, it is then one entry that decodes to all tokens and the end.

        Tokens of nondeterministic devices are read from what replicas have, and RedisUnavailable is raised if too few
        have them. Raises ServiceUnavailable for a record of another protocol, and WireError for a record whose log
        cannot be decoded.
        """
        both = self._client.pipeline(transaction=True)
        both.hgetall(self._keys.request(request_id))
        if whole:
            both.xrange(self._keys.log(request_id))
        else:
            both.xrevrange(self._keys.log(request_id), count=1)
        record, log = cast(tuple[dict[bytes, bytes], Log], await both.execute())
        check_number(record, f"request {request_id}")
        log = whole_log(record, log)
        if self._replicated and any(b"varies" in fields for _, fields in log):
            name = self._keys.log(request_id)
            entries = ("XRANGE", name, "-", "+") if whole else ("XREVRANGE", name, "+", "-", "COUNT", "1")
            again = await self._replicated([("HGETALL", self._keys.request(request_id)), entries])
            record, log = cast(tuple[dict[bytes, bytes], Log], again)
            log = whole_log(record, log)
        return record, log

    async def exist(self, requests: Sequence[str]) -> bool:
        """True if all of these requests were accepted before and are not forgotten."""
        names = [self._keys.request(request_id) for request_id in requests]
        return len(names) == await cast(Any, self._client.exists(*names))

    async def state_and_end(self, request_id: str) -> tuple[str, str]:
        """The record's state and the reason of its end; "queued" and "" if they are missing."""
        state, end = await cast(Any, self._client.hmget(self._keys.request(request_id), "state", "end"))
        return (state or b"queued").decode(), (end or b"").decode()

    async def look_up(self, request_id: str, tenant: str) -> None:
        """Raises NotFound unless there is a record of the request and `check` lets this tenant see it."""
        self.check(
            request_id, await cast(Any, self._client.hmget(self._keys.request(request_id), "model", "tenant")), tenant
        )

    def check(self, name: str, recorded: Sequence[bytes | None], tenant: str) -> None:
        """Raises NotFound for a request of another tenant, and of another model of the cell.

        The message for another tenant's request is that for one that does not exist. Another model's tokens would read
        as nonsense with this gateway's tokenizer. `name` is the client's id of the request, `recorded` its record's
        model and tenant (no model: there is no record).
        """
        if recorded[0] is None or (recorded[1] or b"").decode() != tenant:
            raise NotFound(f"request {name} is unknown or was forgotten after its retention", param="id")
        if recorded[0].decode() != self._model:
            raise NotFound(f"request {name} is for a model that this gateway does not serve", param="id")

    def check_active(self, name: str, active: ActiveRequest, tenant: str) -> None:
        """Raises NotFound unless the tenant may see a request that this gateway follows, which is of its model."""
        self.check(name, (self._model.encode(), active.tenant.encode()), tenant)
