"""Imports ONNX blocks: reads and recognises them, writes a block folder and compares it with the originals.

The folder appears under its name only after all of that.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockrelay import __version__
from blockrelay.block_folder.folder import file_sha256, open_block_folder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import Precision, is_exact
from blockrelay.block_folder.precisions import format_precisions, parse_precisions
from blockrelay.errors import OnnxBlocksError, UsageError
from blockrelay.host.unfinished_folder import check_free, unfinished_folder
from blockrelay.onnx_blocks.beside import FILES
from blockrelay.onnx_blocks.blocks_file import fingerprint, why_other_pages
from blockrelay.onnx_blocks.llama.model import Llama
from blockrelay.onnx_blocks.llama.pattern import recognise
from blockrelay.onnx_blocks.reports.importing import ComparedBlock, ComparedPlaces, ImportResult, ImportStep
from blockrelay.onnx_blocks.served_shape import logits_of
from blockrelay.quantities import format_quantity
from blockrelay.typed_command import typed
from blockrelay_converter.block_writer import BlockSource
from blockrelay_converter.convert import write_folder
from blockrelay_converter.evaluation import evaluated
from blockrelay_converter.onnx_source.files import OnnxBlocks, read_onnx_blocks
from blockrelay_converter.onnx_source.licence import compare
from blockrelay_converter.onnx_source.rotary_source import rotary_of
from blockrelay_converter.onnx_source.settings import ModelDescription, read_settings
from blockrelay_converter.onnx_source.weights import OnnxWeights
from blockrelay_converter.rotary import Rotation, TableRotation

#: Name of a folder in the unfinished one: the model in floats, for the comparison, where the import rounds weights.
_FLOATS = "floats"
#: Tokens of a text on which the loss of perplexity is measured.
_MEASURED_TOKENS = 4096
#: Bytes allowed for the graphs, tokenizer and manifest of a folder.
_FRAME_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """The options of `blockrelay import`."""

    folder: Path
    out: Path
    precision: str | None = None
    """In the syntax of `parse_precisions`; None: the precision in which the blocks store their weights."""
    text: Path | None = None
    """UTF-8 file on which the cost of rounding is measured; not read if all blocks get the weights' float precision."""
    name: str | None = None
    """The model's name for clients; None: a name from the folder."""
    max_position: int | None = None
    """Shortens the context to this many tokens."""
    served: Path | None = None
    """The block folder that describes the blocks while they are served: the import is to compute in their place.

    An unfinished folder that a run with other inputs left at `out` is then removed.
    """


def import_blocks(options: ImportOptions, tell: Callable[[ImportStep], None]) -> ImportResult:
    """Writes the block folder `options.out`, complete or not at all. An interrupted import of the same continues.

    `tell` is called with each step. Raises OnnxBlocksError for blocks that are no Llama or whose import computes
    something else. Raises UsageError for options, settings or weights with which no import is possible, and if the
    folder cannot be written. Raises BlockFolderError if `options.served` is damaged, and ExecutionError if a process
    of the worker fails.

    An error while it writes leaves the unfinished folder beside `out` for the next run. OnnxBlocksError deletes it,
    and UsageError does so if this run began it.
    """
    check_free(options.out.absolute())
    if options.text is not None and not options.text.is_file():
        raise UsageError(f"--text {options.text}: there is no such file")
    return _Import(options, tell).run()


class _Import:
    """One import. Making one checks everything that can be refused without running a block."""

    def __init__(self, options: ImportOptions, tell: Callable[[ImportStep], None]) -> None:
        self._options, self._tell = options, tell
        self._blocks: OnnxBlocks = read_onnx_blocks(options.folder)
        try:
            self._llama: Llama = recognise(self._blocks.graph)
        except OnnxBlocksError:
            logits_of(self._blocks.wiring)  # if the head is missing, its error explains more
            raise
        self._rotary: Rotation = rotary_of(self._blocks, self._llama.rotary, self._llama.head_dim)
        rows = len(self._rotary.cos) if isinstance(self._rotary, TableRotation) else None
        self._settings: ModelDescription = read_settings(
            options.folder, self._llama, name=options.name, max_position=options.max_position, rows=rows
        )
        model = self._settings.model
        self._weights = weights = OnnxWeights(self._blocks, self._llama)
        plain = weights.float_precision()
        self._stored: tuple[Precision, ...] = weights.stored_precisions(model)
        chosen = self._stored if options.precision is None else parse_precisions(options.precision, model.blocks)
        self._source = BlockSource(weights, model, chosen, tied=False)
        self._floats = BlockSource(weights, model, (plain,) * model.blocks, tied=False)
        self._notes = [*self._settings.notes, *_notes_on_weights(weights, self._stored, chosen, plain)]
        if options.text is None and chosen not in (self._stored, ("fp32",) * model.blocks):
            self._notes.append(
                f"what {format_precisions(chosen)} costs is not measured: give --text FILE, or see "
                f"{typed('evaluate --help')}"
            )
        if options.text is not None and self._settings.texts.tokenizer is None:
            raise UsageError("--text needs a tokenizer.json beside the blocks, to read the text with")
        if options.served is not None:
            self._check_stand_in(open_block_folder(options.served, blocks=[]).manifest, plain)
        self._total = self._bytes()
        self._fingerprint: str | None = None

    @property
    def _rounds(self) -> bool:
        """True if the written folder rounds weights, so that the comparison needs a second folder in floats."""
        return self._source.precisions != self._floats.precisions

    def run(self) -> ImportResult:
        """Writes and compares the folder and returns the result. Raises what `import_blocks` raises."""
        options = self._options
        cost: float | None = None
        identity = self._identity()
        with unfinished_folder(options.out.absolute(), identity, afresh=options.served is not None) as folder:
            self._check_room(folder)
            self._step("hashes the blocks", 0)
            self._fingerprint = fingerprint({name: file_sha256(options.folder / name) for name in self._blocks.files})
            floats = folder / _FLOATS if self._rounds else folder
            floats.mkdir(exist_ok=True)
            manifest = self._write(self._floats, floats)
            compared = self._compare(floats)
            if self._rounds:
                manifest = self._write(self._source, folder)
                if options.text is not None:
                    self._step(f"measures on {options.text.name}", 0)
                    cost = evaluated("cost", folder, options.text, _MEASURED_TOKENS, against=floats).number("cost")
                shutil.rmtree(floats)
            if self._identity() != identity:
                raise OnnxBlocksError("altered while it was imported; import it again", file=str(options.folder))
        return ImportResult(
            name=manifest.model.name,
            family=manifest.model.family,
            precision=manifest.precision,
            stored=format_precisions(self._stored),
            blocks=manifest.model.blocks,
            bytes=sum(file.bytes for file in manifest.files.values()),
            compared=compared,
            cost=cost,
            notes=tuple(self._notes),
        )

    def _check_stand_in(self, served: Manifest, plain: Precision) -> None:
        """Raises UsageError if the import must not compute in place of the blocks that `served` describes."""
        if why := why_other_pages(served, self._settings.model, self._stored):
            raise UsageError(why)
        if self._weights.widened(self._stored):
            raise UsageError(
                f"their weights are {' and '.join(self._weights.packed_kinds())}, which an import widens to {plain}"
            )

    def _write(self, source: BlockSource, folder: Path) -> Manifest:
        answered = [index for index, each in enumerate(source.precisions, 1) if is_exact(each)]
        # Only an import with the blocks' own weights may stand in for them: another precision is another model.
        own = self._fingerprint if source.precisions == self._stored else None
        texts = self._settings.texts
        return write_folder(folder, source, self._rotary, texts, self._step, answered=answered, imported_from=own)

    def _compare(self, floats: Path) -> tuple[ComparedBlock, ...]:
        self._step("runs the original blocks", 0)

        def done(block: ComparedBlock) -> None:
            index = int(block.block.removeprefix("block_"))
            self._step(f"compared {block.block}", self._floats.block_bytes(index))

        places = ComparedPlaces(self._llama.layers, self._llama.logits)
        return compare(self._options.folder, floats, places, done)

    def _step(self, what: str, size: int) -> None:
        self._tell(ImportStep(what, size, self._total))

    def _bytes(self) -> int:
        """Returns the tensor bytes of all passes: writing, comparing and computing known answers."""
        total = 2 * self._floats.total_bytes()
        if self._rounds:
            precisions = self._source.precisions
            answered = (index for index, each in enumerate(precisions, 1) if is_exact(each))
            total += self._source.total_bytes() + sum(map(self._source.block_bytes, answered))
        return total

    def _check_room(self, folder: Path) -> None:
        """Raises UsageError if the disk has less room than the import still needs."""
        model = self._settings.model
        needed = self._floats.total_bytes() + (self._source.total_bytes() if self._rounds else 0)
        needed += (4 * model.max_position * model.head_dim + _FRAME_BYTES) * (1 + self._rounds)
        needed -= sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise UsageError(
                f"{folder.parent} has no room: the import takes {format_quantity(needed, 'B')} more, and "
                f"{format_quantity(free, 'B')} are free"
            )

    def _identity(self) -> str:
        """Returns the inputs of this import as JSON; only a run with equal ones may continue an unfinished folder."""
        options, folder = self._options, self._options.folder
        beside = [name for name in FILES if (folder / name).is_file()]
        files = {name: (folder / name).stat() for name in (*self._blocks.files, *beside)}
        return json.dumps(
            {
                "import": str(folder.resolve()),
                "files": {name: [facts.st_size, facts.st_mtime_ns] for name, facts in files.items()},
                "precision": format_precisions(self._source.precisions),
                "name": self._settings.model.name,
                "max_position": options.max_position,
                "release": __version__,
            }
        )


def _notes_on_weights(
    weights: OnnxWeights, stored: Sequence[Precision], chosen: Sequence[Precision], plain: Precision
) -> list[str]:
    """Returns a note on packed weights that the import widens to floats, if there are any."""
    widened = weights.widened(stored)
    if not widened or stored != chosen:
        return []
    return [
        f"weights of {' and '.join(weights.packed_kinds())} are widened to {plain} in {len(widened)} blocks: w4a8 "
        "holds 4 bits in groups of 32 whose scales and zero points * scales float16 holds, in all linear layers of a "
        "block"
    ]
