"""The parts of a worker that outlive its registrations."""

from dataclasses import dataclass

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.host.memory import available_bytes
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.observability.registry import ServiceRegistry
from blockrelay.protocol.block_times import BESIDE_SHARE
from blockrelay.protocol.plan import Plan, Stage
from blockrelay.protocol.served_folder import ServedFolder
from blockrelay.quantities import format_quantity
from blockrelay.redis.registry import read_plan
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.cpu.loading import block_bytes
from blockrelay_worker.execution.fault_injection import salted_id
from blockrelay_worker.execution.loader import Executors
from blockrelay_worker.execution.page_layout import layout_of, pages_for
from blockrelay_worker.execution.ranks.shares import cut
from blockrelay_worker.lifecycle.device.on_device import OnDevice
from blockrelay_worker.policy import KV_SHARE_OF_ONE_WORKER
from blockrelay_worker.speculation.draft_guesser import DraftGuesser
from blockrelay_worker.speculation.loading import load_guesser
from blockrelay_worker.transport.redis_links import Links

#: KV pages of a stage on our CPU kernels at least: its known answers take two.
LEAST_PAGES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """The parts of a worker that outlive its registrations."""

    settings: WorkerSettings
    folders: tuple[BlockFolder, ...]
    """The model without its weights: the folder that the worker starts with, then the same in other precisions."""
    executors: Executors
    links: Links
    registry: ServiceRegistry
    metrics: WorkerMetrics
    """The metrics in `registry`."""
    device: OnDevice | None
    """The device that computes in a process of its own; None: our CPU kernels compute."""
    port: int
    """The port of the worker's status server."""
    draft: BlockFolder | None = None
    """The draft model, without its weights, for first stages on our CPU kernels."""

    @property
    def model(self) -> str:
        """The model's key in Redis, whichever folder is served."""
        return self.folders[0].model_key

    def folder_of(self, key: str) -> BlockFolder:
        """Returns the folder with a key; the one that the worker starts with for "" and for a folder it lacks, or that
        its device refuses."""
        return next((folder for folder in self._served if folder.model_key == key), self.folders[0])

    @property
    def _served(self) -> list[BlockFolder]:
        """The folders without those that the device refuses; it changes with the device."""
        return [folder for folder in self.folders if self.device is None or self.device.serves(folder)]

    def planned_folder(self) -> BlockFolder:
        """Returns the folder that a new worker is to serve by the plan in force.

        Waits for Redis; raises Stopping when the process should end meanwhile.
        """
        links = self.links
        plan: Plan | None = links.retry_until_reachable(
            lambda: read_plan(links.control, links.keys, self.model), "read plan"
        )
        return self.folder_of(plan.folder if plan else "")

    def numerics(self, folder: BlockFolder) -> str:
        """Returns the numerics id to register with for this folder; it changes with the device."""
        return salted_id(self.executors.numerics_id(folder.manifest), self.settings.inject_numerics)

    def pages(self, folder: BlockFolder, blocks: Stage) -> int:
        """Returns the number of KV pages: as many as memory allows, and at most what all requests at full context need.

        At least 2 on our CPU kernels, if the stage has layers. Memory is `kv_bytes` of the settings, or a share of what
        is free. Raises UsageError where the stage does not fit on a device.
        """
        useful = self.settings.max_requests * pages_for(folder.model.max_position)
        budget = self.settings.kv_bytes or int(self._free_on_machine() * KV_SHARE_OF_ONE_WORKER)
        if self.device:
            return self.device.pages(folder, blocks, useful=useful, kv_bytes=budget)
        page_bytes = self._page_bytes(folder, blocks) + self.draft_bytes(blocks, 1, weights=False)
        return useful if page_bytes == 0 else max(LEAST_PAGES, min(useful, budget // page_bytes))

    def fits_beside(self, folder: BlockFolder, blocks: Stage, *, processes: int) -> bool:
        """Returns whether memory has room for another stage beside the present one; never on a device.

        It needs KV pages, and weights of blocks that this process has not loaded. `processes` workers of the model on
        this machine may need as much at the same moment.
        """
        if self.device:
            return False
        needed = self.executors.bytes_to_load(folder.manifest, blocks.first, blocks.last)
        pages = self.pages(folder, blocks)
        needed += pages * self._page_bytes(folder, blocks) + self.draft_bytes(blocks, pages)
        return needed <= self._free_on_machine() * BESIDE_SHARE / max(1, processes)

    def draft_bytes(self, blocks: Stage, pages: int, *, weights: bool = True) -> int:
        """Returns the bytes of the draft model beside a stage with this number of KV pages; 0 beside later stages.

        It has a page for each of them, so that both hold as many tokens. Without `weights` the pages alone.
        """
        if self.draft is None or blocks.first != 1:
            return 0
        whole = Stage(first=1, last=self.draft.model.blocks)
        return stage_bytes(self.draft, whole, pages) - (0 if weights else stage_bytes(self.draft, whole, 0))

    def guesser(self, folder: BlockFolder, blocks: Stage, pages: int) -> DraftGuesser | None:
        """Loads the draft model for a stage of these blocks; None for later stages, and where no guesses are made."""
        if self.draft is None or blocks.first != 1 or self.settings.speculation == "off" or not folder.manifest.exact:
            return None
        fixed, threads = self.settings.draft_tokens, self.settings.threads
        return load_guesser(self.draft, self.metrics, threads=threads, pages=pages, fixed=fixed)

    def lack(self, folder: BlockFolder, blocks: Stage) -> str:
        """Returns why memory has no room for a stage's weights and the fewest KV pages, in words; "": it has.

        Weights that this process has loaded need none. A device says so when it loads the stage.
        """
        if self.device:
            return ""
        needed = self.executors.bytes_to_load(folder.manifest, blocks.first, blocks.last)
        needed += LEAST_PAGES * self._page_bytes(folder, blocks) + self.draft_bytes(blocks, LEAST_PAGES)
        free = self._free_on_machine()
        if needed <= free:
            return ""
        return f"{format_quantity(needed, 'B')} are needed and {format_quantity(free, 'B')} are free"

    def _free_on_machine(self) -> int:
        """Returns the memory that is free, or less if a test says so (`inject_memory`)."""
        free, path = available_bytes(), self.settings.inject_memory
        if path is None:
            return free
        try:
            return min(free, int(path.read_text()))
        except (OSError, ValueError):  # it is not there, or is just being written
            return free

    def check_alone(self, folder: BlockFolder, blocks: Stage) -> None:
        """Raises BlockFolderError for a stage with damaged blocks, and UsageError if the device has no room for it."""
        open_block_folder(folder.root, blocks=range(blocks.first, blocks.last + 1))
        if self.device:
            self.device.check_room(folder, blocks)

    def stage_bytes(self, folder: BlockFolder, blocks: Stage, pages: int) -> int:
        """Returns the bytes that a stage takes of the memory that `free_bytes` is about."""
        if self.device:
            return self.device.stage_bytes(folder, blocks, pages)
        weights = stage_bytes(folder, blocks, 0) + self.draft_bytes(blocks, pages)
        return weights + pages * self._page_bytes(folder, blocks)

    def _page_bytes(self, folder: BlockFolder, blocks: Stage) -> int:
        """Returns the bytes of a KV page of a stage on CPUs: ranks that share a key and value head hold it each."""
        heads, ranks = folder.model.kv_heads, self.settings.tensor_parallel
        held = sum(len(share.kv_heads) for share in cut(folder.model, ranks).shares) if ranks > 1 else heads
        return page_bytes_of(folder, blocks) * held // heads

    def free_bytes(self, folder: BlockFolder) -> int:
        """Returns the free bytes of the device, whose stages are of this folder, where it has a budget; else those of
        the machine."""
        free = self.device.free_bytes(folder) if self.device else None
        return self._free_on_machine() if free is None else free

    def offers(self, blocks: Stage | None, pages: int = 0) -> tuple[ServedFolder, ...]:
        """Returns the folders that the worker can serve, with what a stage of these blocks needs of each, if known:
        KV pages for one request of full length, but on a device at most the `pages` that it has now."""
        return tuple(
            ServedFolder(
                key=folder.model_key,
                precision=folder.manifest.precision,
                kv_cache_layout=folder.manifest.kv_cache_layout,
                numerics=self.numerics(folder),
                bytes=self._needs(folder, blocks, pages) if blocks else 0,
            )
            for folder in self._served
        )

    def _needs(self, folder: BlockFolder, blocks: Stage, pages: int) -> int:
        full = pages_for(folder.model.max_position)
        return self.stage_bytes(folder, blocks, min(full, pages) if self.device else full)


def stage_bytes(folder: BlockFolder, blocks: Stage, pages: int) -> int:
    """Returns the bytes of a stage of these blocks on a CPU: its weights, and this number of KV pages."""
    weights = sum(block_bytes(folder.manifest, index) for index in range(blocks.first, blocks.last + 1))
    return weights + pages * page_bytes_of(folder, blocks)


def page_bytes_of(folder: BlockFolder, blocks: Stage) -> int:
    """Returns the bytes of a KV page of a stage of these blocks; 0 for the head alone."""
    return layout_of(folder, blocks.first, blocks.last).bytes_per_page
