"""How large a configuration is, what may go wrong in it, and which rules of the protocol it keeps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.protocol_model.data import LIVES, Budget, Record

#: Ids of mixes begin here.
MIX = 64


def name_of(ids: Sequence[int]) -> int:
    """The numerics id of a route whose stages have these."""
    each = tuple(dict.fromkeys(ids))
    return each[0] if len(each) == 1 else sum(MIX ** (index + 1) * (one + 1) for index, one in enumerate(each))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Everything True is the protocol. A test switches each off and demands that the model notices."""

    # starred in the design
    claim_is_atomic: bool = True
    commit_checks_run: bool = True
    foreign_runs_are_dropped: bool = True
    dead_reruns_all: bool = True
    gone_worker_forgets: bool = True
    restart_forgets_and_reruns: bool = True
    # others that carry weight
    accept_is_idempotent: bool = True
    abandoned_begin_anew: bool = True
    steps_are_compared: bool = True
    queue_is_fair: bool = True
    claim_reserves: bool = True
    commit_reserves_more: bool = True
    growing_takes_from_the_youngest: bool = True
    claim_skips_what_fits_nowhere: bool = True
    commit_compares_positions: bool = True
    commit_sees_gaps: bool = True
    deadlines_are_kept: bool = True
    terminal_absorbs: bool = True
    rerun_checks_run: bool = True
    only_the_ended_are_forgotten: bool = True
    release_gives_back: bool = True
    end_unqueues: bool = True
    delayed_are_promoted: bool = True
    beat_finds_orphans: bool = True
    identity_is_noted_first: bool = True
    sequence_is_checked: bool = True
    youngest_is_preempted: bool = True
    deaths_need_unchanged_length: bool = True
    suspects_run_alone: bool = True
    only_the_tried_is_blamed: bool = True
    grace_asks_for_other_readers: bool = True
    gateway_accepts_again: bool = True
    gateway_waits_behind: bool = True
    gateway_sees_an_early_end: bool = True
    key_makes_id: bool = True
    pinned_wait: bool = True
    pure_routes: bool = True
    pinned_go_on: bool = True
    freed_ask_again: bool = True
    routes_are_whole: bool = True
    small_pools_serve_nobody: bool = True
    accept_waits: bool = True
    accept_writes_again: bool = True
    cancel_waits: bool = True
    cancel_writes_again: bool = True
    # of devices that vary
    names_chain_tokens: bool = True
    private_names_name_the_request: bool = True
    varying_pages_are_private: bool = True
    begins_anew_without_a_token: bool = True
    found_limits_the_next: bool = True
    denied_wait: bool = True
    denied_wait_for_all_gpus: bool = True
    denied_are_given_up: bool = True
    slow_stand_ins_end_it: bool = True
    giving_up_looks_again: bool = True
    drains_are_no_failures: bool = True
    pinned_of_all_classes_are_taken: bool = True
    exact_are_for_cpus: bool = True
    varying_tokens_wait: bool = True
    private_tokens_say_so: bool = True
    waits_where_it_read: bool = True
    # of blocks that move
    routes_are_of_one_plan: bool = True
    # of workers that retire
    retiring_take_nothing_new: bool = True
    retiring_are_in_no_new_route: bool = True
    retiring_take_what_was_freed: bool = True
    retiring_stay_while_needed: bool = True
    retiring_say_so_first: bool = True
    freed_need_a_whole_route: bool = True
    others_must_hold_what_is_left: bool = True
    varying_end_where_they_run: bool = True
    staying_is_said_again: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The size of one configuration."""

    stages: int = 2
    workers: int = 2  # per stage
    requests: int = 1
    tokens: int = 2  # every answer has so many
    prompt: int = 2  # units of a prompt; read in two pieces where there are two stages
    pages: int = 100  # of a worker, one unit each
    pools: tuple[int, ...] = ()  # pages of each slot, ascending within a stage and numerics id; else all have `pages`
    room: int = 1  # runs that a worker takes
    needs: tuple[int, ...] = ()  # pages that each request may need; else prompt + tokens
    tenants: tuple[int, ...] = ()  # whose each request is; else all of one
    ids: tuple[int, ...] = ()  # numerics id of each slot, ascending within a stage; else all have one
    plans: tuple[int, ...] = ()  # the plan by which each slot has its stage, ascending as `ids`; else all have one
    alone: bool = False  # a worker of numerics id 1 comes when that of id 0 beside it, in the slot before, is gone
    varying: frozenset[int] = frozenset()  # of these, ids of devices that do not compute the same bits twice
    exact: frozenset[int] = (
        frozenset()
    )  # requests that end rather than go on under another id, or under one that varies
    handover: bool = False  # pages are stored and found, and a device that varies may choose either of two tokens
    pages_leave: bool = True  # with `handover`
    choices: frozenset[int] = frozenset({1})  # of these tokens a device that varies may choose either of two
    gpus: frozenset[int] = frozenset()  # numerics ids of GPUs; with `handover`
    deny: frozenset[int] = frozenset()  # requests with `fallback: deny`
    limited: frozenset[int] = frozenset()  # requests whose `max_slowdown` every CPU is predicted to exceed
    spills: bool = False  # a request for a GPU may begin on a CPU, whatever moved CLAIM to that
    recompute: frozenset[int] = frozenset()  # requests with `fallback: recompute`
    lost_from: int = 0  # nothing is lost by Redis before the first request has so many tokens
    announce: bool = False  # the last stage tells the first its tokens before COMMIT does
    delays: bool = False  # from the second re-run at one length on, a request waits
    poison: frozenset[int] = frozenset()  # requests that kill the worker that computes them
    quarantine_after: int = 0  # deaths after which a request is tried alone; 0: deaths are not counted
    max_quarantine_deaths: int = 0
    gateways: int = 0  # with clients that send the requests; else all are in the queue at the beginning
    clients: int = 0
    steps: int = 0  # of the session, when it is one
    clients_return: bool = True  # when they are cut off
    background: bool = False  # clients want to know that their request is accepted, and no more
    replicas: bool = False  # whoever is told something waits until the replicas have it (BLOCKRELAY_ACCEPT_REPLICAS)
    ends_when_done: bool = True  # nothing is looked at behind the last end
    either_worker: bool = True  # CLAIM's choice among equally loaded workers is open; else it is the first
    faults: Budget = field(default_factory=Budget)
    rules: Rules = field(default_factory=Rules)

    @property
    def slots(self) -> int:
        return self.stages * self.workers

    @property
    def sessions(self) -> bool:
        return self.steps > 0

    def stage(self, worker: int) -> int:
        return worker // LIVES // self.workers

    def pool(self, worker: int) -> int:
        return self.pools[worker // LIVES] if self.pools else self.pages

    def numerics(self, worker: int) -> int:
        return self.ids[worker // LIVES] if self.ids else 0

    def plan(self, worker: int) -> int:
        return self.plans[worker // LIVES] if self.plans else 0

    def may_share(self, a: int, b: int) -> bool:
        """Whether the stages of two workers are of one plan: then their borders fit."""
        return self.plan(a) == self.plan(b) or not self.rules.routes_are_of_one_plan

    def route_numerics(self, route: Sequence[int]) -> int:
        """The numerics id of a route: of its workers, or of their mix."""
        return name_of([self.numerics(worker) for worker in route])

    def varies(self, numerics: int) -> bool:
        return numerics >= MIX or numerics in self.varying

    def pinned(self, record: Record) -> bool:
        """Whether its tokens decide the numerics id under which it goes on."""
        return bool(record.log) and not (record.numerics and self.varies(record.own_id))

    def is_gpu(self, worker: int) -> bool:
        return self.numerics(worker) in self.gpus

    @property
    def for_gpu(self) -> bool:
        """The class that ACCEPT gives to requests: of the first stage, by the plan."""
        return any(self.is_gpu(slot * LIVES) for slot in range(self.workers))

    def pages_needed(self, request: int) -> int:
        return self.needs[request] if self.needs else self.prompt + self.tokens

    def tenant(self, request: int) -> int:
        return self.tenants[request] if self.tenants else 0
