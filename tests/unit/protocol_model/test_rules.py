"""Every rule carries weight: without it the model breaks an invariant, or gets stuck for ever.

The first ones are the starred rules of the design.
"""

from dataclasses import fields, replace

import pytest

from tests.protocol_model.bounds import Rules
from tests.protocol_model.configurations import CONFIGURATIONS
from tests.protocol_model.data import State
from tests.protocol_model.explorer import Counterexample, explore
from tests.protocol_model.protocol import Protocol

pytestmark = pytest.mark.model

#: Rule -> the configuration that needs it, and what becomes of that one without it.
NOTICED = {
    # starred
    "claim_is_atomic": ("pipeline", "I3"),
    "commit_checks_run": ("pipeline", "I1"),
    "foreign_runs_are_dropped": ("pipeline", "hangs"),
    "dead_reruns_all": ("pipeline", "hangs"),
    "gone_worker_forgets": ("pipeline", "hangs"),
    "restart_forgets_and_reruns": ("pipeline", "hangs"),
    # the others
    "accept_is_idempotent": ("clients", "I3"),
    "abandoned_begin_anew": ("clients", "I8"),
    "steps_are_compared": ("sessions", "I10"),
    "queue_is_fair": ("queue", "I11"),
    "claim_reserves": ("reservation", "hangs"),
    "commit_reserves_more": ("reservation", "hangs"),
    "growing_takes_from_the_youngest": ("reservation", "I4"),
    "claim_skips_what_fits_nowhere": ("reservation", "hangs"),
    "commit_compares_positions": ("pipeline", "I1"),
    "commit_sees_gaps": ("pipeline", "I1"),
    "deadlines_are_kept": ("cancellation", "I12"),
    "terminal_absorbs": ("cancellation", "I5"),
    "rerun_checks_run": ("pipeline", "I3"),
    "only_the_ended_are_forgotten": ("clients", "I2"),
    "release_gives_back": ("pipeline", "I3"),
    "end_unqueues": ("pipeline", "I3"),
    "delayed_are_promoted": ("queue", "hangs"),
    "beat_finds_orphans": ("pipeline", "hangs"),
    "identity_is_noted_first": ("pipeline", "hangs"),
    "sequence_is_checked": ("pipeline", "I1"),
    "youngest_is_preempted": ("preemption", "hangs"),
    "deaths_need_unchanged_length": ("poison", "I7"),
    "suspects_run_alone": ("poison", "hangs"),
    "only_the_tried_is_blamed": ("poison", "I7"),
    "grace_asks_for_other_readers": ("clients", "I8"),
    "gateway_accepts_again": ("clients", "hangs"),
    "gateway_waits_behind": ("clients", "I8"),
    "gateway_sees_an_early_end": ("clients", "hangs"),
    "key_makes_id": ("clients", "hangs"),
    "pinned_wait": ("upgrade", "I13"),
    "pinned_go_on": ("upgrade", "hangs"),
    "freed_ask_again": ("upgrade", "I13"),
    "pure_routes": ("mixed", "I13"),
    "routes_are_of_one_plan": ("plans", "I17"),
    "retiring_take_nothing_new": ("precisions", "I18"),
    "retiring_are_in_no_new_route": ("precisions", "I18"),
    "retiring_take_what_was_freed": ("precisions", "hangs"),
    "retiring_stay_while_needed": ("precisions", "I18"),
    "retiring_say_so_first": ("precisions", "I18"),
    "freed_need_a_whole_route": ("precisions", "hangs"),
    "others_must_hold_what_is_left": ("precisions", "I18"),
    "varying_end_where_they_run": ("precisions", "I18"),
    "staying_is_said_again": ("precisions", "hangs"),
    "routes_are_whole": ("upgrade", "hangs"),
    "small_pools_serve_nobody": ("upgrade", "hangs"),
    "names_chain_tokens": ("hand-over", "I15"),
    "private_names_name_the_request": ("hand-over", "I15"),
    "varying_pages_are_private": ("hand-over", "I15"),
    "begins_anew_without_a_token": ("hand-over", "I15"),
    "found_limits_the_next": ("hand-over", "hangs"),
    "pinned_of_all_classes_are_taken": ("hand-over", "hangs"),
    "exact_are_for_cpus": ("hand-over", "hangs"),
    "denied_wait": ("denial", "I16"),
    "denied_wait_for_all_gpus": ("denial", "I16"),
    "denied_are_given_up": ("denial", "hangs"),
    "slow_stand_ins_end_it": ("denial", "I16"),
    "giving_up_looks_again": ("denial", "I16"),
    "drains_are_no_failures": ("denial", "I16"),
    "varying_tokens_wait": ("shown", "I8"),
    "waits_where_it_read": ("shown", "I8"),
    "private_tokens_say_so": ("shown", "I8"),
    "accept_waits": ("failovers", "I14"),
    "accept_writes_again": ("failovers", "I14"),
    "cancel_waits": ("failovers", "I14"),
    "cancel_writes_again": ("failovers", "I14"),
}


#: What is noticed in the first of the full bounds only: somebody has to see tokens of two devices in a row.
LARGE = {"private_tokens_say_so"}


def test_every_rule_is_listed() -> None:
    assert set(NOTICED) == {field.name for field in fields(Rules)}


def without(rule: str, configuration: str) -> Counterexample[State]:
    (chosen,) = [c for c in CONFIGURATIONS if c.name == configuration]
    for bounds in chosen.quick + (chosen.full[:1] if rule in LARGE else ()):
        found = explore(Protocol(replace(bounds, rules=replace(Rules(), **{rule: False}))), most_states=100_000)
        if found.counterexample is not None:
            return found.counterexample
    raise AssertionError(f"nobody notices that {rule} is off")


@pytest.mark.parametrize("rule", NOTICED)
def test_without_the_rule_the_model_finds_a_fault(rule: str) -> None:
    configuration, expected = NOTICED[rule]
    fault = without(rule, configuration)
    assert fault.what.split(":")[0] == expected if fault.kind == "broken" else expected == "hangs", str(fault)
