"""What remains of an ended request: little, but enough to read it from any position."""

import threading
from dataclasses import replace

import pytest

from blockrelay.protocol.encoding.end_meta import encode_end_meta
from blockrelay.protocol.messages import Claimed, EndEntry, LogEntry, TokenEntry, TokenLogprobs, decode_log_entry
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.protocol.transitions import calls
from tests.support.cell import Cell, body
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until

#: As a worker of a model of 33 blocks says it.
META = encode_end_meta(
    {
        "execution_times": {f"block_{i}": 0.012345 + i / 1000 for i in range(1, 34)},
        "gpu_blocks": [],
        "route": ["host-of-the-worker:12345:0123456789abcdef"],
        "seed": 2**53 - 1,
        "cached_tokens": 0,
    }
)
REQUEST = "req-0123456789abcdef01234567"
NUMERICS = "w8a8-0123456789abcdef"
#: Three bytes each in the body.
PROMPT = [128_000 + at for at in range(32)]


@pytest.fixture
def cell(cell: Cell) -> Cell:
    cell.agree(dead_after_s=3600)
    cell.worker("w", split="1-4", numerics=NUMERICS)
    return cell


def claimed(cell: Cell) -> Claimed:
    """The one request, now on the worker: a second re-run at one position waits a little."""
    runs: list[Claimed] = []
    wait_until(lambda: runs.extend(cell.claim("w")) or runs, "it is claimed", poll_s=0.005)
    return runs[0]


def run_to_its_end(
    cell: Cell, tokens: list[int], *, fingerprint: str = "", retention_s: int = 0, reruns: int = 0
) -> None:
    """One commit for each token, and so many deaths after the first one."""
    params = SamplingParams(max_tokens=len(tokens), temperature=0.0, seed=2**53 - 1).to_dict()
    content = replace(body(PROMPT, **params), gateway="0123456789abcdef")
    assert cell.accept(REQUEST, content=content, fingerprint=fingerprint, retention_s=retention_s).status == "OK"
    run = claimed(cell)
    for at, token in enumerate(tokens[:-1]):
        cell.commit(run, at, [token])
        for _ in range(reruns if at == 0 else 0):
            assert cell.rerun(run, "death")
            run = claimed(cell)
    assert cell.commit(run, len(tokens) - 1, tokens[-1:], end="length", meta=META).verdict == "OK"
    cell.client.xtrim(cell.keys.inbox("w"), maxlen=0)  # the worker has read it


@pytest.mark.parametrize(("keyed", "reruns"), [(False, 0), (True, 0), (False, 2)])
def test_it_keeps_less_than_a_kilobyte_beside_its_tokens(cell: Cell, keyed: bool, reruns: int) -> None:
    tokens = [100_000, 100_200, 100_300, 100_400, 100_500]
    run_to_its_end(cell, tokens, fingerprint="f" * 64 * keyed, retention_s=3600 * keyed, reruns=reruns)
    kept = cell.client.keys(f"*{REQUEST}*")
    lingers, record = cell.keys.log(REQUEST).encode(), cell.keys.request(REQUEST).encode()
    assert sorted(kept) == [lingers, record] and 0 < cell.client.ttl(lingers) <= 15  # pyright: ignore
    theirs = 3 * len(PROMPT) + 5 * len(tokens)
    assert cell.client.memory_usage(record) < 1024 + theirs  # pyright: ignore
    assert cell.client.object("encoding", record) in (b"listpack", b"ziplist")  # pyright: ignore
    before = cell.log(REQUEST)
    cell.client.delete(lingers)
    assert cell.log(REQUEST) == before and len(before) == 6


def test_the_timeline_the_end_and_the_body_remain(cell: Cell) -> None:
    run_to_its_end(cell, [7, 8], reruns=1)
    for _ in range(2):  # also when its log lingers no more
        events = [event["event"] for event in cell.timeline(REQUEST)]
        assert events == ["accepted", "queued", "claimed", "first_token", "rerun", "claimed", "end"]
        cell.client.delete(cell.keys.log(REQUEST))
    end = cell.end(REQUEST)
    assert end.meta["execution_times"]["block_33"] == round(0.012345 + 33 / 1000, 6)
    assert end.numerics == NUMERICS


def read_behind(cell: Cell, position: int) -> list[LogEntry]:
    """As a gateway does that has seen so many entries."""
    found = cell.client.xread({cell.keys.log(REQUEST): f"{position}-0"}) or []
    return [e for _, raw in found for i, f in raw for e in decode_log_entry(i, f, after=position)]  # pyright: ignore


@pytest.mark.parametrize("count", [0, 1, 5, 1024, 1025])
def test_a_reader_goes_on_behind_any_position(cell: Cell, count: int) -> None:
    probs = TokenLogprobs(-0.5, ((1, -0.5),)).encode()
    run = cell.begin("w", request_id=REQUEST)
    tokens = [(at * 40_009) % 128_256 for at in range(count)]
    if tokens:
        cell.commit(run, 0, tokens, logprobs=(probs,) * count)
    before = cell.log(REQUEST)
    assert [e.token for e in before if isinstance(e, TokenEntry)] == tokens
    cell.commit(run, count, [], end="stop", meta=META)
    after = cell.log(REQUEST)
    assert after[:-1] == before and isinstance(after[-1], EndEntry) and after[-1].position == count + 1
    for position in {0, 1, count // 2, count - 1, count}:
        if 0 <= position <= count:
            assert read_behind(cell, position) == after[position:]
    assert read_behind(cell, count + 1) == []


def test_its_first_entry_says_the_numerics_id(cell: Cell) -> None:
    run = cell.begin("w", request_id=REQUEST)
    cell.commit(run, 0, [7, 8], end="stop")
    first, second, end = cell.log(REQUEST)
    assert isinstance(end, EndEntry) and end.numerics
    assert (first, second) == (TokenEntry(1, 7, numerics=end.numerics), TokenEntry(2, 8))


def test_a_reader_that_waits_gets_the_end(cell: Cell, redis_server: RedisServer) -> None:
    """Its log is replaced while it blocks on it."""
    run = cell.begin("w", [7, 8], request_id=REQUEST)
    heard: list[LogEntry] = []

    def wait() -> None:
        with redis_server.client() as mine:
            answer = mine.xread({cell.keys.log(REQUEST): "2-0"}, block=4000)
            heard.extend(e for _, raw in answer for i, f in raw for e in decode_log_entry(i, f, after=2))  # pyright: ignore

    reader = threading.Thread(target=wait)
    reader.start()
    wait_until(lambda: cell.client.info("clients")["blocked_clients"] > 0, "it waits")  # pyright: ignore
    cell.commit(run, 2, [9], end="stop")
    reader.join()
    assert [e.position for e in heard] == [3, 4] and isinstance(heard[0], TokenEntry) and heard[0].token == 9


class TestForget:
    """What has ended goes early when room is short."""

    @staticmethod
    def ended(cell: Cell, *names: str, old: bool = True, fingerprint: str = "", retention_s: int = 0) -> None:
        for name in names:
            run = cell.begin("w", request_id=name, fingerprint=fingerprint, retention_s=retention_s)
            cell.commit(run, 0, [7], end="stop")
            if old:
                cell.client.hset(cell.keys.request(name), "progress_ms", 1)

    @staticmethod
    def there(cell: Cell, *names: str) -> set[str]:
        return {name for name in names if cell.record(name)}

    def test_the_oldest_go_first_and_those_that_are_kept_on_purpose_last(self, cell: Cell) -> None:
        self.ended(cell, "keyed", fingerprint="f", retention_s=3600)
        self.ended(cell, "a", "b", "c")
        names = ("keyed", "a", "b", "c")
        for most, left in ((2, {"keyed", "c"}), (1, {"keyed"}), (9, set[str]())):
            assert cell.scripts.run(calls.forget(most)) == (min(most, 1) if most == 9 else most, len(left))
            assert self.there(cell, *names) == left
        assert cell.scripts.run(calls.forget(9)) == (0, 0)
        assert not cell.client.keys("*:log:*") and cell.outstanding() == {}

    def test_what_has_not_ended_and_what_is_read_stays(self, cell: Cell) -> None:
        self.ended(cell, "new", old=False)
        self.ended(cell, "read", fingerprint="f")
        assert cell.accept("read", fingerprint="f", reader="g").status == "EXISTS"
        self.ended(cell, "anew")
        cell.client.hset(cell.keys.request("anew"), "abandoned", 1)
        assert cell.accept("anew").status == "OK"
        cell.accept("queued")
        assert cell.scripts.run(calls.forget(9))[0] == 0
        assert self.there(cell, "new", "read", "anew", "queued") == {"new", "read", "anew", "queued"}
        assert cell.claim("w")[0].request_id == "anew"

    def test_many_that_are_read_hold_up_nobody_behind_them(self, cell: Cell) -> None:
        read, old = [f"read{at}" for at in range(200)], ["a", "b", "c"]
        self.ended(cell, *read, *old)
        for name in read:
            cell.client.hset(cell.keys.followers(name), "g", "")
            cell.client.expire(cell.keys.followers(name), 1000)
        assert cell.scripts.run(calls.forget(9)) == (3, len(read))
        assert self.there(cell, *read, *old) == {*read}

    def test_names_that_retention_has_taken_leave_the_list(self, cell: Cell) -> None:
        self.ended(cell, "a", "b", "c")
        cell.client.delete(*(cell.keys.request(name) for name in ("a", "b")))
        self.ended(cell, "d")
        assert cell.client.lrange(cell.keys.ended("first"), 0, -1) == [b"c", b"d"]
        assert 0 < cell.client.ttl(cell.keys.ended("first")) <= 60  # pyright: ignore
