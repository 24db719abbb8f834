"""Clients that survive gateways, and gateways that survive nothing: they hold hints, and are back at once without them.

A client sends the same POST with its key until it has heard the end; the id of its request derives from the key. A
session's client sends step after step, and the step that a refusal names. All that a gateway knows of a request is a
flight: the entries of the log that it has heard. What replicas do not have yet is told to nobody (`may_tell`).
"""

from tests.protocol_model import scripts
from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import Client, Flight, Record, State
from tests.protocol_model.worker.table import Steps


def steps(b: Bounds, state: State) -> Steps:
    for number, client in enumerate(state.clients):
        if b.sessions:
            yield from _session(b, state, number, client)
        else:
            yield from _client(b, state, number, client)
    for gateway, flights in enumerate(state.flights):
        for flight in flights:
            if flight.ended == "refused":
                yield from _takes_back(b, state, gateway, flight)
            elif not flight.ended:
                yield from _follows(b, state, gateway, flight)
                yield from _gives_up(b, state, gateway, flight)
        if state.budget.gateway_kill and flights:
            spent = state.budget._replace(gateway_kill=state.budget.gateway_kill - 1)
            clients = tuple(c._replace(gateway=-1) if c.gateway == gateway else c for c in state.clients)
            killed = _with_flights(state, gateway, ())._replace(clients=clients, budget=spent)
            yield f"kill -9 gateway {gateway}", killed, True


def may_tell(b: Bounds, state: State, *, waits: bool, wrote: bool) -> bool:
    """Whether WAIT behind a script has answered that the replicas have it: it speaks of what its own connection wrote.

    Else the client is told that the service is not available, though the script has run.
    """
    return not (b.replicas and waits and wrote) or state.saved is None


def _with_client(state: State, number: int, client: Client) -> State:
    changed = list(state.clients)
    changed[number] = client
    return state._replace(clients=tuple(changed))


def _with_flights(state: State, gateway: int, flights: tuple[Flight, ...]) -> State:
    changed = list(state.flights)
    changed[gateway] = flights
    return state._replace(flights=tuple(changed))


def _flight(state: State, gateway: int, request: int) -> Flight | None:
    return next((f for f in state.flights[gateway] if f.request == request), None)


def _put(state: State, gateway: int, flight: Flight) -> State:
    others = tuple(f for f in state.flights[gateway] if f.request != flight.request)
    return _with_flights(state, gateway, tuple(sorted((*others, flight))))


def _attached(state: State, gateway: int, request: int) -> State:
    """A live flight of the request; one that ended badly is begun anew."""
    known = _flight(state, gateway, request)
    good = known is not None and known.ended in ("", "length", "tensor")
    return state if good else _put(state, gateway, Flight(request))


def _left(state: State, number: int, client: Client) -> State:
    """The client has all; a flight that has ended goes with its last reader."""
    before = state.clients[number]
    state = _with_client(state, number, client)
    if any(c.gateway == before.gateway and c.request == before.request for c in state.clients):
        return state
    flights = tuple(f for f in state.flights[before.gateway] if f.request != before.request)
    return _with_flights(state, before.gateway, flights)


# --- one request with an Idempotency-Key ---


def _client(b: Bounds, state: State, number: int, client: Client) -> Steps:
    if client.ended:
        return
    if client.gateway < 0:
        for gateway in range(b.gateways) if b.clients_return or not client.posted else ():
            request = _id(b, state, client)
            if request is None:
                continue
            redis, (answer, _) = scripts.accept(b, state.redis, request, pages_needed=b.pages_needed(0))
            name = f"client {number} posts to gateway {gateway}: {request} {answer}"
            wrote = answer == "OK" or b.rules.accept_writes_again
            if not may_tell(b, state, waits=b.rules.accept_waits, wrote=wrote):
                # It is the key's, and perhaps another client's too: it is not taken back.
                yield f"{name}, and the replicas do not have it", state._replace(redis=redis), False
                continue
            posted = client._replace(request=request, gateway=gateway, posted=True)
            if b.background:
                posted = posted._replace(gateway=-1, ended="accepted")
            after = _attached(_with_client(state._replace(redis=redis), number, posted), gateway, request)
            yield name, after, False
            if state.budget.lost_reply:  # the gateway's answer is cut off: the client knows nothing
                spent = state.budget._replace(lost_reply=state.budget.lost_reply - 1)
                lost = _with_client(after, number, client)._replace(budget=spent)
                yield f"{name}, reply lost", lost, True
        return
    if state.budget.leave:
        spent = state.budget._replace(leave=state.budget.leave - 1)
        left = _with_client(state, number, client._replace(gateway=-1))._replace(budget=spent)
        yield f"client {number} goes away", left, True
    flight = _flight(state, client.gateway, client.request)
    if flight is None or flight.ended == "gone":
        yield f"client {number} is sent away", _left(state, number, client._replace(gateway=-1)), False
        return
    at = len(client.seen)
    if len(flight.heard) > at:
        seen = client._replace(seen=(*client.seen, flight.heard[at]), by=flight.by[: at + 1])
        yield f"client {number} gets event {at + 1}", _with_client(state, number, seen), False
    elif flight.ended:
        done = client._replace(ended=flight.ended, gateway=-1)
        yield f"client {number} gets the end: {flight.ended}", _left(state, number, done), False


def _id(b: Bounds, state: State, client: Client) -> int | None:
    """Which request a POST is about. All clients of this model share one key."""
    if b.rules.key_makes_id:
        return 0
    return next((i for i, record in enumerate(state.redis.requests) if record is None), None)


def _gives_up(b: Bounds, state: State, gateway: int, flight: Flight) -> Steps:
    """The grace period of a flight without readers is over. (Who reads has registered; FINISH looks itself.)"""
    readers = [c for c in state.clients if c.gateway >= 0 and c.request == flight.request]
    if not b.faults.leave or any(c.gateway == gateway for c in readers):
        return
    if readers and b.rules.grace_asks_for_other_readers:
        return
    redis, answer = scripts.finish(b, state.redis, flight.request, "cancelled", abandoned=True)
    if answer == "FINISHED":
        yield f"gateway {gateway}: nobody reads request {flight.request}", state._replace(redis=redis), False


def _takes_back(b: Bounds, state: State, gateway: int, flight: Flight) -> Steps:
    """Of a request that was refused because the replicas did not have it, what Redis has."""
    flights = tuple(f for f in state.flights[gateway] if f.request != flight.request)
    read = any(f.request == flight.request for others in state.flights for f in others if f.ended != "refused")
    redis = state.redis
    if not read:
        redis, _ = scripts.finish(b, redis, flight.request, "cancelled", abandoned=True)
    after = _with_flights(state._replace(redis=redis), gateway, flights)
    yield f"gateway {gateway} takes {flight.request} back", after, False


def _follows(b: Bounds, state: State, gateway: int, flight: Flight) -> Steps:
    record = state.redis.requests[flight.request]
    name = f"gateway {gateway}, request {flight.request}"
    if flight.read:
        if state.saved is None:
            heard = flight._replace(heard=(*flight.heard, flight.read[0]), by=(*flight.by, flight.read[1]), read=())
            yield f"{name} hears that the replicas have what it read", _put(state, gateway, heard), False
        return
    if record is None:
        if b.rules.gateway_accepts_again:
            step = flight.step
            body = _body(state, step)
            redis, (answer, _) = scripts.accept(
                b,
                state.redis,
                flight.request,
                pages_needed=b.pages_needed(0),
                step=step,
                prior=max(0, step - 1),
                body=body,
            )
            if answer in ("OK", "EXISTS"):
                yield f"{name}: ACCEPT again", state._replace(redis=redis), False
                return
        yield f"{name}: the record is gone", _put(state, gateway, flight._replace(ended="gone")), False
        return
    at = len(flight.heard)
    if len(record.log) > at:
        by = (*flight.by, _who(b, record, at)) if b.ids else ()
        heard = flight._replace(heard=(*flight.heard, record.log[at]), by=by)
        waits = b.replicas and at in record.flagged and b.rules.varying_tokens_wait
        if waits and not b.rules.waits_where_it_read:
            read = flight._replace(read=(record.log[at], _who(b, record, at)))
            yield f"{name} reads token {at + 1}", _put(state, gateway, read), False
        elif not waits or state.saved is None:
            yield f"{name} hears token {at + 1}", _put(state, gateway, heard), False
    elif len(record.log) < at and not b.rules.gateway_waits_behind:
        again = flight._replace(heard=(*flight.heard, *record.log))
        yield f"{name} begins anew", _put(state, gateway, again), bool(not record.log)
    elif record.ends and (len(record.log) == at or b.rules.gateway_sees_an_early_end):
        ended = flight._replace(ended=record.ends[-1], result=record.body)
        yield f"{name} hears the end", _put(state, gateway, ended), False


def _who(b: Bounds, record: Record, at: int) -> int:
    """The numerics id of whoever computed a token; with `handover` -1 where no device that varies had a part in it."""
    alone = b.handover and not any(b.varies(name) for name, start in record.numerics if start <= at)
    return -1 if alone else record.id_of(at)


# --- a session of tensor steps ---


def _body(state: State, step: int) -> tuple[int, ...]:
    """What a gateway sends for a step: the tokens before it, as the session has them, and its own."""
    if not step:
        return ()
    session = state.redis.session
    before = session.tokens if session is not None else ()
    return (*before[: step - 1], step) if session is not None and session.step >= step else (*before, step)


def _session(b: Bounds, state: State, number: int, client: Client) -> Steps:
    """`client.step` is the one it wants answered; `client.seen` are the inputs of the last answer."""
    if client.step > b.steps:
        return
    if client.gateway < 0:
        session = state.redis.session
        used = {f.request for flights in state.flights for f in flights} | {session.request if session else -1}
        free = (i for i, record in enumerate(state.redis.requests) if record is None and i not in used)
        request = next(free, None)  # ids are random: never one that is in use
        if request is None:
            return
        prior = len(session.tokens) if session else 0
        step = client.step
        for gateway in range(b.gateways):
            redis, (answer, detail) = scripts.accept(
                b, state.redis, request, pages_needed=b.pages_needed(0), step=step, prior=prior, body=_body(state, step)
            )
            name = f"client {number} posts step {step} to gateway {gateway}: {answer}"
            if answer == "STEP":
                back = _with_client(state, number, client._replace(step=detail))
                if detail != step:
                    yield f"{name} {detail}", back, False
                continue
            followed = detail if answer == "REPEAT" else request
            after = state._replace(redis=redis)
            wrote = answer == "OK" or b.rules.accept_writes_again
            if not may_tell(b, state, waits=b.rules.accept_waits, wrote=wrote):
                if state.budget.lost_reply:  # every attempt is another request
                    spent = state.budget._replace(lost_reply=state.budget.lost_reply - 1)
                    if answer == "OK":
                        after = _put(after, gateway, Flight(request, step=step, ended="refused"))
                    yield f"{name}, and the replicas do not have it", after._replace(budget=spent), True
                continue
            known = _flight(after, gateway, followed)
            if known is None or known.ended in ("gone", "refused"):
                after = _put(after, gateway, Flight(followed, step=step))
            posted = client._replace(request=followed, gateway=gateway)
            yield name, _with_client(after, number, posted), False
            if state.budget.lost_reply:
                spent = state.budget._replace(lost_reply=state.budget.lost_reply - 1)
                yield f"{name}, reply lost", after._replace(budget=spent), True
        return
    flight = _flight(state, client.gateway, client.request)
    if flight is None or flight.ended not in ("", "tensor"):
        yield f"client {number} gets no answer", _left(state, number, client._replace(gateway=-1)), False
    elif flight.ended:
        answered = client._replace(seen=flight.result, step=client.step + 1, gateway=-1)
        yield f"client {number} gets the answer of step {client.step}", _left(state, number, answered), False
