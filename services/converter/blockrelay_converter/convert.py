"""Converts a checkpoint to a block folder: the steps in their order."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from blockrelay.block_folder.folder import file_sha256
from blockrelay.block_folder.manifest import (
    MANIFEST_NAME,
    ROTARY_NAME,
    Basis,
    BlockSpec,
    FileSpec,
    Manifest,
    check_manifest,
)
from blockrelay.block_folder.model import Precision, is_exact, quantises_rows
from blockrelay.block_folder.precisions import DEFAULT_PRECISION, all_exact, parse_precisions
from blockrelay.errors import UsageError
from blockrelay.text.text_assets import Texts
from blockrelay.text.text_file import read_text_file
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_converter.block_writer import NO_FEEDBACK, BlockSource, source_digest
from blockrelay_converter.checkpoint.safetensors import Checkpoint
from blockrelay_converter.checkpoint.source import read_source
from blockrelay_converter.golden_answers import known_answers
from blockrelay_converter.linear_graphs import graphs
from blockrelay_converter.mixing.like import Like
from blockrelay_converter.quantisation.calibration import Calibration, sequences
from blockrelay_converter.quantisation.calibration_record import REPORT_NAME
from blockrelay_converter.quantisation.rotated_weights import RotatedWeights
from blockrelay_converter.quantisation.smoothing_scales import NO_SMOOTHING
from blockrelay_converter.rotary import Rotation, rotation_of, write_rotary
from blockrelay_converter.staging import staged_folder

Report = Callable[[str, int, int], None]
"""A function that shows progress: it is called with (current work, bytes done since the last call, bytes in all).

Bytes are those of the blocks' tensors, counted once for each pass over them: calibration, writing, known answers.
"""
Note = Callable[[str], None]
"""A function that is called with a line for the user."""

_UNCALIBRATED = "w4a8 rounds weights that have more than 4 bits: --calibrate TEXT lowers what that costs"


def ignore(_: str) -> None:
    """Drops the line: the `Note` of callers that show none."""


def convert(
    checkpoint: Path,
    out: Path,
    *,
    precision: str | None = None,
    report: Report,
    note: Note = ignore,
    name: str | None = None,
    max_position: int | None = None,
    force: bool = False,
    answers: bool = True,
    calibration_text: Path | None = None,
    basis: Basis | None = None,
    like: Like | None = None,
) -> Manifest:
    """Writes the block folder `out` and returns its manifest. `out` appears in one rename, complete.

    `precision` is text such as `w8a8,block_33=fp32`; None: DEFAULT_PRECISION. `name` is the model's name for clients
    (default: the one that `read_source` finds). `max_position` shortens the context to that many tokens. `out` must be
    absent or an empty folder; with `force` it may be a block folder, which is replaced. Without `answers` exact blocks
    carry no known answers, and workers refuse them. `basis` is that of the residual stream; None: that of `basis_of`.
    `like` is a folder whose precisions, basis, context and calibration are taken: `precision`, `max_position` and
    `calibration_text` may only repeat them. Blocks that come out equal are links to its files.
    `calibration_text` is a UTF-8 file that decides how linear layers are rounded (`Calibration`) and leaves a report in
    the folder. It needs a tokenizer and a block in w8a8 or w4a8. `note` is called before the work begins, once for each
    thing that is not applied or may surprise the user. Raises UsageError, UnsupportedModel, BlockFolderError (for a
    folder of ONNX blocks) or ExecutionError, and then leaves nothing behind.
    """
    if like is None:
        checked = read_source(checkpoint, name=name, max_position=max_position)
        precisions = parse_precisions(DEFAULT_PRECISION if precision is None else precision, checked.model.blocks)
        basis = basis or basis_of(precisions)
    else:
        precisions, basis = like.precisions(precision), like.manifest.basis
        like.check_text(calibration_text)
        checked = like.source(checkpoint, name=name, max_position=max_position)
    config, texts, model = checked.config, checked.texts, checked.model
    weights, tied = Checkpoint(checkpoint), config.tied
    if basis == "rotated":
        scratch = out.absolute().parent
        source = BlockSource(RotatedWeights(weights, model, tied=tied, scratch=scratch), model, precisions, tied=False)
    else:
        source = BlockSource(weights, model, precisions, tied=tied)
    answered = [index for index, each in enumerate(precisions, 1) if answers and is_exact(each)]
    rotation = rotation_of(config.rotary, model.head_dim)
    if like is None:
        calibration = _calibration(source, rotation, texts, calibration_text)
    else:
        calibration = _calibration_of(like, source, rotation)
    passes = 1 + 2 * (calibration is not None)
    total = source.total_bytes() * passes + sum(source.block_bytes(index) for index in answered)
    if like is not None:
        like.check_rotation(rotation)
        like.verify()
    for line in checked.notes:
        note(line)
    rounds = like is None and calibration is None and "w4a8" in precisions
    if rounds and texts.tokenizer is not None and not source.on_grid():
        note(_UNCALIBRATED)
    with staged_folder(out, force=force) as folder:

        def report_progress(what: str, done: int) -> None:
            report(what, done, total)

        sources: dict[int, str] = {}
        for index in range(1, model.blocks + 1) if calibration is not None else ():
            report_progress(f"tensors of block_{index}", 0)
            sources[index] = source_digest(weights, model, index, tied=tied)
            report_progress(f"tensors of block_{index}", source.block_bytes(index))
        if like is not None:
            like.compare(sources)
        return write_folder(
            folder, source, rotation, texts, report_progress,
            answered=answered, basis=basis, calibration=calibration, sources=sources, like=like,
        )  # fmt: skip


def basis_of(precisions: Sequence[Precision]) -> Basis:
    """Returns the basis in which most layers of these precisions, one per block, lose least.

    Rounding to 8 bits gains by rotation. Rounding to 4 bits loses by it, most where the weights lie on a grid of 4 bits
    already. Floats gain nothing.
    """
    layers = precisions[:-1]
    most = layers.count("w8a8") >= len(layers) / 2
    return "rotated" if all_exact(precisions) and most else "original"


def _calibration(source: BlockSource, rotation: Rotation, texts: Texts, path: Path | None) -> Calibration | None:
    """Returns a calibration with the text in the file `path`, which has not begun; None without a file.

    Raises UsageError for whatever can be refused before the work begins.
    """
    if path is None:
        return None
    if not any(quantises_rows(precision) for precision in source.precisions):
        raise UsageError("--calibrate is for --precision w8a8 and w4a8: fp32 and fp16 round no activations")
    if texts.tokenizer is None:
        raise UsageError("--calibrate needs a tokenizer.json in the checkpoint, to read the text with")
    text = read_text_file(path)
    tokens = sequences(Tokenizer(texts.tokenizer.decode()), text, context=source.model.max_position)
    return Calibration(source, rotation, tokens, hashlib.sha256(text.encode()).hexdigest())


def _calibration_of(like: Like, source: BlockSource, rotation: Rotation) -> Calibration | None:
    """Returns a calibration with the tokens that the folder of `like` kept; None if it was not calibrated."""
    record = like.record
    return record and Calibration(source, rotation, record.pieces, record.text_sha256)


def write_folder(
    folder: Path,
    source: BlockSource,
    rotation: Rotation,
    texts: Texts,
    report: Callable[[str, int], None],
    *,
    answered: Sequence[int],
    basis: Basis = "original",
    calibration: Calibration | None = None,
    sources: Mapping[int, str] = MappingProxyType({}),
    like: Like | None = None,
    imported_from: str | None = None,
) -> Manifest:
    """Writes all files of a block folder into `folder`, which exists, the manifest last, and returns the manifest.

    `report` is called with the current work and the tensor bytes done since the last call. `answered` has the indexes
    of all exact blocks in order, which then get known answers, or is empty. `basis` is that of the weights of `source`.
    `calibration` must be new, and `sources` then has the `source_digest` of each block. Blocks that are equal to those
    of `like` become links to its files, with its known answers. `imported_from` goes into the manifest: the
    fingerprint of the ONNX blocks that the folder was made of, or None. Block files that an interrupted run with equal
    arguments has already written are kept.
    Raises UsageError, OnnxBlocksError (from ONNX weights) or ExecutionError.
    """
    model = source.model
    for name in ("graphs", "blocks"):
        (folder / name).mkdir(exist_ok=True)
    write_rotary(folder / ROTARY_NAME, rotation, max_position=model.max_position)
    linears = {kind: (f"graphs/{kind}.onnx", content) for kind, content in graphs(model, source.precisions).items()}
    contents = texts.files() | dict(linears.values())
    for path, content in contents.items():
        (folder / path).write_bytes(content)
    blocks: list[BlockSpec] = []
    unchanged = frozenset[int]() if like is None else like.unchanged
    for index in range(1, model.blocks + 1):
        written, path = partial(report, f"block_{index}"), f"blocks/block_{index}.bin"
        smoothing, feedback = NO_SMOOTHING, NO_FEEDBACK
        if calibration is not None:
            report(f"calibration of block_{index}", 0)
            if index not in unchanged:
                smoothing, feedback = calibration.run(index)
            elif not unchanged.issuperset(range(index, model.blocks + 1)):  # blocks behind it need its output
                calibration.pass_through(index)
            report(f"calibration of block_{index}", source.block_bytes(index))
        if like is not None and index in unchanged:
            like.take(index, folder / path)
        blocks.append(source.write(index, folder, path, written, smoothing, feedback))
        if like is not None:
            like.adopt(index, folder / path)
    files = sorted([ROTARY_NAME, *contents, *(block.file for block in blocks)])
    manifest = Manifest(
        model=model,
        generation=texts.generation,
        ignored_defaults=texts.ignored_defaults,
        precisions=source.precisions,
        basis=basis,
        exact=all_exact(source.precisions),
        graphs={kind: path for kind, (path, _) in linears.items()},
        blocks=tuple(blocks),
        files={path: _file_spec(folder / path) for path in files},
        imported_from=imported_from,
    )
    check_manifest(manifest)
    (folder / MANIFEST_NAME).write_bytes(manifest.encode())
    if calibration is not None:
        sums = {index: manifest.block_file(index).sha256 for index in sources}
        kept = {} if like is None or like.record is None else {index: like.record.blocks[index] for index in unchanged}
        (folder / REPORT_NAME).write_bytes(calibration.record(sources, sums, kept).encode())
    if answered:
        report("known answers", 0)

        def done(index: int) -> None:
            report(f"known answer of block_{index}", source.block_bytes(index))

        shared = [index for index in answered if like is not None and index in like.shared]
        answers = {index: like.manifest.block(index).known_answer for index in shared if like is not None}
        for index in answers:
            done(index)
        if computed := [index for index in answered if index not in answers]:
            answers |= known_answers(folder, computed, done)
        blocks = [replace(block, known_answer=answers.get(block.index)) for block in blocks]
        manifest = replace(manifest, blocks=tuple(blocks))
        (folder / MANIFEST_NAME).write_bytes(manifest.encode())
    return manifest


def _file_spec(path: Path) -> FileSpec:
    return FileSpec(sha256=file_sha256(path), bytes=os.stat(path).st_size)
