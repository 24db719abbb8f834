"""Opens the page store that the settings ask for."""

from functools import partial
from typing import get_args

import redis

from blockrelay.block_folder.folder import MODEL_KEY_DIGITS
from blockrelay.block_folder.manifest import Manifest
from blockrelay.errors import UsageError
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.keys import Keys
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.executor import PageOwner
from blockrelay_worker.kv.store.record import PageShape
from blockrelay_worker.kv.store.redis_tier import RedisTier
from blockrelay_worker.kv.store.shm_tier import ShmTier
from blockrelay_worker.kv.store.store import PageStore
from blockrelay_worker.kv.store.supplied_kv import SuppliedPages
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

    Shared memory is a tier if `settings` has a folder and bytes for it, the payload Redis if they have bytes for it.
    `client` is the payload Redis, `owner` has the pages, `first_block` is the stage's first block, from 1. The
    stage has at least one layer: a head alone has no store. Raises UsageError for a folder that cannot be used.
    """
    layout = owner.layout
    shape = PageShape(layout.kv_heads, layout.head_dim, layout.dtype)

    def count(label: str, kind: TierFailure) -> None:
        metrics.page_store_trouble.labels(label, kind).inc()

    tiers: list[Tier] = []
    if settings.page_store_folder is not None and settings.page_store_bytes:
        try:
            tiers.append(
                ShmTier(
                    settings.page_store_folder,
                    limit=settings.page_store_bytes,
                    record_bytes=shape.record_bytes,
                    trouble=partial(count, ShmTier.label),
                    blocks=range(first_block, first_block + layout.layers),
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
    for tier in tiers:
        metrics.expect_tier(tier.label, get_args(TierFailure))
    return PageStore(owner, tiers, first_block=first_block, metrics=metrics, given=SuppliedPages(client, keys))
