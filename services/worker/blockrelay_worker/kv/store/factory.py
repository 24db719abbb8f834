"""Opens the page store that the settings ask for."""

import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import get_args

import redis

from blockrelay.block_folder.folder import MODEL_KEY_DIGITS
from blockrelay.block_folder.manifest import Manifest
from blockrelay.errors import UsageError
from blockrelay.observability.logs import get
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.keys import Keys
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.executor import PageOwner
from blockrelay_worker.kv.store.file_tier import FileTier
from blockrelay_worker.kv.store.record import PageShape
from blockrelay_worker.kv.store.redis_tier import RedisTier
from blockrelay_worker.kv.store.store import PageStore
from blockrelay_worker.kv.store.supplied_kv import SuppliedPages
from blockrelay_worker.kv.store.swap_folder import open_swap_folder
from blockrelay_worker.kv.store.tier import Tier, TierFailure


def open_page_store(
    settings: WorkerSettings,
    client: redis.Redis,
    keys: Keys,
    manifest: Manifest,
    owner: PageOwner,
    *,
    first_block: int,
    metrics: WorkerMetrics,
) -> PageStore:
    """Returns a started store, which the caller closes. Without a tier it only reads KV that clients supplied.

    Shared memory is a tier if `settings` has a folder and bytes for it, the payload Redis if they have bytes for it,
    and a swap folder if they name one. `client` is the payload Redis, `owner` has the pages, `first_block` is the
    stage's first block, from 1. The stage has at least one layer: a head alone has no store. Raises UsageError for a
    folder that cannot be used.
    """
    layout = owner.layout
    shape = PageShape(layout.kv_heads, layout.head_dim, layout.dtype)

    def count(label: str, kind: TierFailure) -> None:
        metrics.page_store_trouble.labels(label, kind).inc()

    tiers: list[Tier] = []
    blocks = range(first_block, first_block + layout.layers)
    if settings.page_store_folder is not None and settings.page_store_bytes:
        try:
            tiers.append(
                FileTier(
                    settings.page_store_folder,
                    limit=settings.page_store_bytes,
                    record_bytes=shape.record_bytes,
                    trouble=partial(count, "shm"),
                    blocks=blocks,
                )
            )
        except OSError as error:
            raise UsageError(f"BLOCKRELAY_PAGE_STORE_FOLDER: {error}") from error
    if settings.page_store_redis_bytes:
        tiers.append(
            RedisTier(
                client,
                keys,
                model=manifest.model_hash[:MODEL_KEY_DIGITS],
                limit=settings.page_store_redis_bytes,
                page_bytes=manifest.model.layers * shape.record_bytes,
                ttl_s=settings.page_store_ttl_s,
                trouble=partial(count, RedisTier.label),
            )
        )
    swap = _swap_tier(settings, shape, blocks, partial(count, "swap")) if settings.swap_folder else None
    for tier in (*tiers, *([swap] if swap else [])):
        metrics.expect_tier(tier.label, get_args(TierFailure))
    given = SuppliedPages(client, keys)
    return PageStore(owner, tiers, first_block=first_block, metrics=metrics, given=given, swap=swap)


def _swap_tier(
    settings: WorkerSettings, shape: PageShape, blocks: range, count: Callable[[TierFailure], None]
) -> FileTier:
    """Opens the tier on a disk. Raises UsageError for a folder that cannot be used."""
    assert settings.swap_folder is not None
    told = set[TierFailure]()

    def tell(kind: TierFailure) -> None:
        count(kind)
        if kind not in told:
            told.add(kind)
            get().warning("SWAP_TROUBLE", kind=kind, folder=str(settings.swap_folder))

    handle = open_swap_folder(settings.swap_folder)
    tier = FileTier(
        settings.swap_folder,
        label="swap",
        limit=settings.swap_bytes,
        record_bytes=shape.record_bytes,
        trouble=tell,
        blocks=blocks,
        swap=True,
    )
    weakref.finalize(tier, os.close, handle)
    return tier
