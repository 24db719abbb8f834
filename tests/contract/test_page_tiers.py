"""One contract for every tier of the page store: what it gives is what was put, or nothing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import redis

from blockrelay.protocol.keys import Keys
from blockrelay_worker.kv.store.file_tier import FileTier
from blockrelay_worker.kv.store.record import PageShape, decode_record, encode_record
from blockrelay_worker.kv.store.redis_tier import RedisTier
from blockrelay_worker.kv.store.tier import StoredPage, Tier, TierFailure

SHAPE = PageShape(kv_heads=2, head_dim=8, dtype=np.float16)
BLOCKS = range(3, 6)
ROOM = 10  # pages of BLOCKS


@dataclass
class Place:
    """A tier's place, which several processes' tiers open; `trouble` is what they counted."""

    open: Callable[[], Tier]
    break_a_record: Callable[[bytes], None]
    trouble: list[TierFailure] = field(default_factory=list[TierFailure])


@pytest.fixture(params=["shm", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path, client: redis.Redis, keys: Keys) -> Iterator[Place]:
    trouble: list[TierFailure] = []
    limit = ROOM * len(BLOCKS) * SHAPE.record_bytes
    if request.param == "shm":
        folder = tmp_path / "pages"

        def open_shm() -> Tier:
            return FileTier(folder, limit=limit, record_bytes=SHAPE.record_bytes, trouble=trouble.append)

        def flip(name: bytes) -> None:
            for path in folder.glob(f"{name.hex()}.*"):
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)

        yield Place(open_shm, flip, trouble)
        return

    def open_redis() -> Tier:
        page = len(BLOCKS) * SHAPE.record_bytes
        return RedisTier(client, keys, model="m", limit=limit, page_bytes=page, ttl_s=60, trouble=trouble.append)

    def flip_field(name: bytes) -> None:
        data = bytearray(client.hget(keys.page(name.hex()), "5") or b"")  # pyright: ignore
        data[-1] ^= 1
        client.hset(keys.page(name.hex()), "5", bytes(data))  # pyright: ignore

    yield Place(open_redis, flip_field, trouble)


def name_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def page(number: int, blocks: range = BLOCKS) -> StoredPage:
    """A page whose content tells its number and block."""
    records: list[bytes] = []
    for block in blocks:
        keys = np.full((2, 8, 16), number, np.float16)
        values = np.full((2, 16, 8), block, np.float16)
        records.append(bytes(encode_record(name_of(number), block, SHAPE, keys, values)))
    return StoredPage(name_of(number), records)


def test_what_one_process_puts_another_gets(place: Place) -> None:
    writer, reader = place.open(), place.open()
    writer.put([page(1), page(2)], BLOCKS)
    if reader.label == "shm":
        reader = place.open()  # it looks for the blocks that are there when it comes
    assert reader.may_have(name_of(1))
    got = reader.get([name_of(2), name_of(9), name_of(1)], BLOCKS)
    assert got == [list(page(2).records), None, list(page(1).records)]
    assert place.trouble == []


def test_a_stage_of_other_blocks_finds_those_it_needs(place: Place) -> None:
    tier = place.open()
    tier.put([page(1, range(1, 4))], range(1, 4))
    tier.put([page(1, range(4, 7))], range(4, 7))
    assert place.open().get([name_of(1)], range(2, 6)) == [list(page(1, range(2, 6)).records)]
    assert place.open().get([name_of(1)], range(5, 9)) == [None]


def test_the_first_writer_wins(place: Place) -> None:
    tier = place.open()
    tier.put([page(1)], BLOCKS)
    tier.put([StoredPage(name_of(1), [b"x" * SHAPE.record_bytes] * len(BLOCKS))], BLOCKS)
    assert tier.get([name_of(1)], BLOCKS) == [list(page(1).records)]


def test_the_limit_pushes_out_what_was_not_used_for_longest(place: Place) -> None:
    tier = place.open()
    for number in range(ROOM):
        tier.put([page(number)], BLOCKS)
    assert None not in tier.get([name_of(0)], BLOCKS)
    for number in range(ROOM, ROOM + 3):
        tier.put([page(number)], BLOCKS)
    assert tier.used_bytes() <= ROOM * len(BLOCKS) * SHAPE.record_bytes
    there = [records is not None for records in tier.get([name_of(n) for n in range(ROOM + 3)], BLOCKS)]
    assert there[0] and there[-1], "used last, written last"
    assert not any(there[1:3])
    assert place.open().get([name_of(ROOM + 2)], BLOCKS) != [None]


def test_held_pages_make_no_room_until_they_are_let_go(place: Place) -> None:
    tier = place.open()
    tier.put([page(number) for number in range(3)], BLOCKS)
    assert tier.hold([name_of(0), name_of(99), name_of(1)], BLOCKS) == [True, False, True]
    for number in range(3, 2 * ROOM):
        tier.put([page(number)], BLOCKS)
    assert tier.used_bytes() <= ROOM * len(BLOCKS) * SHAPE.record_bytes
    assert place.open().get([name_of(n) for n in range(3)], BLOCKS) == [
        list(page(0).records), list(page(1).records), None,
    ]  # fmt: skip
    tier.hold([name_of(0), name_of(1)], BLOCKS)
    tier.let_go([name_of(0)], BLOCKS)
    for number in range(2 * ROOM, 4 * ROOM):
        tier.put([page(number)], BLOCKS)
    there = [records is not None for records in tier.get([name_of(0), name_of(1)], BLOCKS)]
    assert there == [False, True]
    assert place.trouble == []


def test_a_tier_holds_no_more_than_half_of_what_it_has_room_for(place: Place) -> None:
    tier = place.open()
    tier.put([page(number) for number in range(ROOM)], BLOCKS)
    held = tier.hold([name_of(number) for number in range(ROOM)], BLOCKS)
    assert held == [number < ROOM // 2 for number in range(ROOM)]
    tier.put([page(ROOM)], BLOCKS)
    assert tier.get([name_of(ROOM)], BLOCKS) != [None], "there is room for others"


def test_what_is_read_is_held_no_longer(place: Place) -> None:
    tier = place.open()
    tier.put([page(1)], BLOCKS)
    assert tier.hold([name_of(1)], BLOCKS) == [True]
    tier.get([name_of(1)], BLOCKS)
    for number in range(2, 2 * ROOM):
        tier.put([page(number)], BLOCKS)
    assert tier.get([name_of(1)], BLOCKS) == [None]


def test_a_page_larger_than_the_limit_is_not_stored(place: Place) -> None:
    tier = place.open()
    if isinstance(tier, FileTier):
        tier.put([page(1, range(1, 3 * ROOM + 2))], range(1, 3 * ROOM + 2))
        assert tier.used_bytes() == 0


def test_a_broken_record_is_recognised_and_discarded(place: Place) -> None:
    tier = place.open()
    tier.put([page(1)], BLOCKS)
    place.break_a_record(name_of(1))
    (records,) = tier.get([name_of(1)], BLOCKS)
    assert records is not None
    assert decode_record(records[-1], name_of(1), 5, SHAPE) is None
    tier.discard(name_of(1), BLOCKS)
    assert tier.get([name_of(1)], BLOCKS) == [None]
    tier.put([page(1)], BLOCKS)
    assert tier.get([name_of(1)], BLOCKS) == [list(page(1).records)]


def test_a_swap_folder_is_held_as_a_whole_and_empty_afterwards(tmp_path: Path) -> None:
    trouble: list[TierFailure] = []
    size = len(BLOCKS) * SHAPE.record_bytes
    tier = FileTier(
        tmp_path, label="swap", limit=3 * size, record_bytes=SHAPE.record_bytes, trouble=trouble.append, swap=True
    )
    for number in range(4):
        tier.put([page(number)], BLOCKS)
        assert tier.hold([name_of(number)], BLOCKS) == [number < 3]
    assert trouble == ["full"]
    assert tier.get([name_of(0), name_of(3)], BLOCKS) == [list(page(0).records), None]
    assert tier.get([name_of(0)], BLOCKS) == [None], "it is in the pool now"
    tier.let_go([name_of(number) for number in range(4)], BLOCKS)
    assert list(tmp_path.iterdir()) == []


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    """The folder's lock is its oldest file."""
    (tmp_path / "owner").write_bytes(b"x" * 1000)
    limit = len(BLOCKS) * SHAPE.record_bytes
    tier = FileTier(tmp_path, limit=limit, record_bytes=SHAPE.record_bytes, trouble=lambda kind: None)
    for number in range(3):
        tier.put([page(number)], BLOCKS)
    assert tier.used_bytes() == limit and tier.get([name_of(2)], BLOCKS) != [None]
    assert (tmp_path / "owner").exists()


def test_a_folder_that_is_full_or_gone_stores_and_finds_nothing(tmp_path: Path) -> None:
    """/dev/full: every write there finds no room left."""
    trouble: list[TierFailure] = []
    folder = tmp_path / "pages"
    tier = FileTier(folder, limit=1 << 20, record_bytes=SHAPE.record_bytes, trouble=trouble.append)
    tier.put([page(1)], BLOCKS)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    tier.put([page(2)], BLOCKS)
    assert tier.get([name_of(1), name_of(2)], BLOCKS) == [None, None]
    assert trouble == ["unreachable"]


def test_a_page_that_no_longer_fits_on_the_disk_is_a_counted_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource
    import signal

    trouble: list[TierFailure] = []
    tier = FileTier(tmp_path / "pages", limit=1 << 20, record_bytes=SHAPE.record_bytes, trouble=trouble.append)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SHAPE.record_bytes, before[1]))  # the file ends in mid-page
    try:
        tier.put([page(1)], BLOCKS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert trouble == ["full"]
    assert tier.get([name_of(1)], BLOCKS) == [None]
    assert list((tmp_path / "pages").iterdir()) == [], "half a page is not left behind"


def test_what_a_writer_began_and_left_is_removed_after_a_while(tmp_path: Path) -> None:
    import os

    folder = tmp_path / "pages"
    folder.mkdir()
    old, new = folder / ".begun-1-1", folder / ".begun-2-1"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    FileTier(folder, limit=1 << 20, record_bytes=SHAPE.record_bytes, trouble=lambda kind: None)
    assert not old.exists() and new.exists()


def test_redis_pages_leave_when_nobody_uses_them(client: redis.Redis, keys: Keys) -> None:
    tier = RedisTier(client, keys, model="m", limit=1 << 20, page_bytes=1 << 10, ttl_s=60, trouble=lambda kind: None)
    tier.put([page(1)], BLOCKS)
    for key in (keys.page(name_of(1).hex()), keys.pages("m")):
        assert 0 < int(client.pttl(key)) <= 60_000  # pyright: ignore


def test_a_redis_that_is_full_or_gone_is_counted_and_left_alone(client: redis.Redis, keys: Keys) -> None:
    trouble: list[TierFailure] = []
    client.set(keys.page(name_of(1).hex()), "not a hash", ex=60)
    tier = RedisTier(client, keys, model="m", limit=1 << 20, page_bytes=1 << 10, ttl_s=60, trouble=trouble.append)
    assert tier.get([name_of(1)], BLOCKS) == [None]
    assert trouble == ["full"]
    assert not tier.may_have(name_of(2)), "for a while nobody waits for it"
    tier.put([page(2)], BLOCKS)
    assert trouble == ["full"]


def test_what_another_worker_of_the_same_stage_writes_is_found_without_a_look(tmp_path: Path) -> None:
    first, second = (
        FileTier(tmp_path, limit=1 << 20, record_bytes=SHAPE.record_bytes, trouble=lambda kind: None, blocks=BLOCKS)
        for _ in range(2)
    )
    first.put([page(1)], BLOCKS)
    assert second.may_have(name_of(1))
