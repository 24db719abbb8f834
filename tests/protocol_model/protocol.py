"""The protocol in one configuration, as the explorer wants it."""

from collections.abc import Iterator

from tests.protocol_model import canonical, gateway, invariants, scripts, surroundings
from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import LIVES, Client, Process, Redis, State
from tests.protocol_model.explorer import Step
from tests.protocol_model.worker import steps as worker


class Protocol:
    """`initial` has all workers ready and, unless clients send them, all requests accepted."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds

    def initial(self) -> State:
        b = self._bounds
        redis = Redis(requests=(None,) * b.requests)
        if not b.clients:  # before any worker has come, when even what fits no pool is accepted
            for request in range(b.requests):
                redis, _ = scripts.accept(
                    b, redis, request, tenant=b.tenant(request), pages_needed=b.pages_needed(request)
                )
        state = State(
            redis=redis,
            processes=tuple(Process(id=slot * LIVES, noted=b.rules.identity_is_noted_first) for slot in range(b.slots)),
            budget=b.faults,
            flights=((),) * b.gateways,
            clients=(Client(),) * b.clients,
            passed=(0,) * len(set(b.tenants)),
        )
        if b.alone:
            rest = [p._replace(up="gone") if b.numerics(p.id) else p for p in state.processes]
            state = state._replace(processes=tuple(rest))
        for process in state.processes:
            if process.up == "gone":
                continue
            redis = scripts.announce(redis, process.id, b.pool(process.id))
            state = state.with_payload(process.id, ())
        return state._replace(redis=redis)

    def steps(self, state: State) -> Iterator[Step[State]]:
        b = self._bounds
        if b.ends_when_done and self.done(state):
            return
        for slot in range(b.slots):
            yield from worker.steps(b, state, slot)
        yield from gateway.steps(b, state)
        yield from surroundings.steps(b, state)

    def canonical(self, state: State) -> State:
        return canonical.canonical(self._bounds, state)

    def broken(self, state: State) -> str | None:
        return invariants.broken(self._bounds, state)

    def done(self, state: State) -> bool:
        """All requests have ended, but those that fit no worker; all clients have heard it."""
        b = self._bounds
        if b.sessions:
            return all(client.step > b.steps for client in state.clients)
        if b.background:
            accepted = [state.redis.requests[client.request] for client in state.clients if client.ended]
            return len(accepted) == b.clients and all(r is not None and r.state == "done" for r in accepted)
        if b.clients:
            return all(client.ended for client in state.clients)
        return all(
            record is not None and (record.state == "done" or b.pages_needed(request) > b.pages)
            for request, record in enumerate(state.redis.requests)
        )
