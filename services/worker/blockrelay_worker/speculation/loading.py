"""Loads a draft model beside the served one."""

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.observability.logs import get
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay_worker.execution.cpu.loading import CpuExecutors
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.sampling.row_sampler import sampler_of
from blockrelay_worker.speculation.draft_guesser import DraftGuesser
from blockrelay_worker.speculation.draft_model import DraftModel


def load_guesser(
    folder: BlockFolder, metrics: WorkerMetrics, *, threads: int, pages: int, fixed: int | None
) -> DraftGuesser | None:
    """Loads the model in `folder` with `pages` KV pages and measures its calls; None if it cannot be used here.

    A failure of any kind leaves one line in the log. `fixed` is that of DraftGuesser.
    """
    try:
        executor = CpuExecutors(threads).load(folder, 1, folder.model.blocks, pages=pages)
        model = DraftModel(executor, sampler_of(load_kernels(threads)), context=folder.model.max_position)
        model.warm_up()
    except Exception as error:  # noqa: BLE001 the served model goes on without, whatever is wrong with this one
        get().error("DRAFT_MODEL_OFF", folder=str(folder.root), error=f"{type(error).__name__}: {error}")
        return None
    get().info("DRAFT_MODEL_READY", folder=str(folder.root), pages=pages, call_ms=round(1000 * model.call_s(1), 3))
    return DraftGuesser(model, metrics, fixed=fixed)
