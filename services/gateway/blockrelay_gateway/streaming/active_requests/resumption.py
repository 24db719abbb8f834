"""Makes a request active that any gateway accepted before, from its record."""

from blockrelay.errors import NotFound
from blockrelay.protocol.records.ended import body_of, decode_log, whole_record
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_gateway.streaming.active_requests.acceptance import Acceptance
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.streaming.active_requests.gateway_lease import GatewayLease
from blockrelay_gateway.streaming.active_requests.request_registry import RequestRegistry
from blockrelay_gateway.streaming.cell_links import CellLinks
from blockrelay_gateway.streaming.records import Records


class Resumption:
    """Resumes requests from their records."""

    def __init__(self, links: CellLinks, records: Records, lease: GatewayLease, registry: RequestRegistry) -> None:
        self._client, self._keys, self._model = links.client, links.keys, links.model
        self._records, self._lease, self._registry = records, lease, registry

    async def resume(self, request_id: str, tenant: str) -> ActiveRequest:
        """Returns the active request of this id (the one in its cell) and tenant, which this gateway reads from now on.

        Raises NotFound when there is no such record (any more), or when it is of another tenant or model. Raises
        WireError when it cannot be decoded, and ServiceUnavailable when it is of another protocol or Redis fails.
        """
        self._registry.seek(request_id)
        if known := self._registry.get(request_id):
            self._records.check_active(request_id, known, tenant)
        else:
            await self._records.look_up(request_id, tenant)
        async with self._lease.joining(request_id):
            return await self._read(request_id, tenant)

    async def _read(self, request_id: str, tenant: str) -> ActiveRequest:
        if known := self._registry.get(request_id):
            return known
        record, log = await self._records.read(request_id, whole=False)
        if not record:
            await self._client.delete(self._keys.followers(request_id))
            raise NotFound(f"request {request_id} is unknown or was forgotten after its retention", param="id")
        body = body_of(record, log)
        if body.gateway:
            await self._lease.add(request_id, body.gateway)  # it did not know that it would not be the only one
        if known := self._registry.get(request_id):  # another reader resumed it while this one was reading
            return known
        acceptance = Acceptance(
            request_id=request_id,
            body=body,
            model=self._model,
            pages_needed=int(record.get(b"pages_needed", b"0")),
            deadline_ms=int(record.get(b"deadline_ms", b"0")),
            fingerprint=record.get(b"fingerprint", b"").decode(),
            retention_s=int(record.get(b"retention_s", b"0")),
            tenant=tenant,
        )
        active = ActiveRequest(
            acceptance=acceptance,
            params=SamplingParams.from_dict(body.params),
            created=int(record[b"accepted_ms"]) // 1000,
            cell=self._keys.cell,
            owned=False,
            numerics=whole_record(record, log).get(b"numerics", b"").decode(),
        )
        self._registry.start(active)
        if record[b"state"] == b"done" and b"0" in record:
            self._registry.receive_all(active, decode_log(log))
        return active
