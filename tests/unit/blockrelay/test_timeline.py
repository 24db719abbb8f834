"""The timeline of a record."""

from blockrelay.protocol.records.timeline import timeline, waits_for


def test_events_come_in_the_order_they_happened() -> None:
    record = {
        b"accepted_ms": b"1000",
        b"claimed_ms": b"1010",
        b"notes": b"1010cgpu;1200t;1500rgpu_error@3;1500fblock_2;1500w1-2,gpu_timeout,TIMEOUT;1500fblock_3;1510ccpu;",
        b"first_token_ms": b"1200",
        b"end": b"stop",
        b"progress_ms": b"1900",
    }
    assert timeline(record) == [
        {"event": "accepted", "at_ms": 1000},
        {"event": "queued", "at_ms": 1000},
        {"event": "claimed", "at_ms": 1010, "route_class": "gpu"},
        {"event": "first_token", "at_ms": 1200},
        {"event": "rerun", "at_ms": 1500, "reason": "gpu_error", "tokens": 3},
        {
            "event": "fallback",
            "at_ms": 1500,
            "block_id": "block_2",
            "blocks": ["block_1", "block_2"],
            "reason": "gpu_timeout",
            "error_code": "TIMEOUT",
        },
        {"event": "fallback", "at_ms": 1500, "block_id": "block_3"},
        {"event": "claimed", "at_ms": 1510, "route_class": "cpu"},
        {"event": "end", "at_ms": 1900, "reason": "stop"},
    ]


def test_neither_one_millisecond_nor_a_clock_that_was_put_back_changes_the_order() -> None:
    record = {
        b"accepted_ms": b"9000",
        b"claimed_ms": b"9000",
        b"notes": b"9000ccpu;9000t;9000rdrain@2;400ccpu;400rdeath@7;",
        b"first_token_ms": b"9000",
        b"end": b"stop",
        b"progress_ms": b"300",
    }
    names = ["accepted", "queued", "claimed", "first_token", "rerun", "claimed", "rerun", "end"]
    assert [event["event"] for event in timeline(record)] == names


def test_a_first_token_whose_note_was_pushed_out_came_before_all_that_is_left() -> None:
    record = {b"accepted_ms": b"5", b"claimed_ms": b"6", b"first_token_ms": b"8", b"notes": b"9rdeath@1;9ccpu;"}
    names = ["accepted", "queued", "claimed", "first_token", "rerun", "claimed"]
    assert [e["event"] for e in timeline(record)] == names


def test_a_request_that_waits_has_only_begun() -> None:
    assert [e["event"] for e in timeline({b"accepted_ms": b"5", b"progress_ms": b"5"})] == ["accepted", "queued"]


def test_a_claim_whose_note_was_pushed_out_is_still_known() -> None:
    events = timeline({b"accepted_ms": b"5", b"claimed_ms": b"6", b"notes": b"7rdeath@0;"})
    assert [e["event"] for e in events] == ["accepted", "queued", "claimed", "rerun"]


def test_a_re_run_says_for_which_numerics_id_it_waits_and_when_it_went_on_under_another() -> None:
    record = {b"accepted_ms": b"5", b"claimed_ms": b"6", b"notes": b"6ccpu;7t;8rdrain@3=w8a8-01;9ccpu;9nw8a8-02-new@3;"}
    assert timeline(record)[-3:] == [
        {"event": "rerun", "at_ms": 8, "reason": "drain", "tokens": 3, "numerics_id": "w8a8-01"},
        {"event": "claimed", "at_ms": 9, "route_class": "cpu"},
        {"event": "numerics_changed", "at_ms": 9, "numerics_id": "w8a8-02-new", "tokens": 3},
    ]


def test_whose_workers_a_request_waits_for() -> None:
    assert waits_for({b"job": b"pinned 1-0", b"numerics": b"w8a8-01"}) == "w8a8-01"
    assert waits_for({b"job": b"pinned 1-0", b"numerics": b"w8a8-01+w8a8-02-new@3"}) == "w8a8-02-new"
    for job in (b"", b"queue", b"delayed", b"reruns 1-0"):
        assert waits_for({b"job": job, b"numerics": b"w8a8-01"}) is None
    assert waits_for({}) is None
