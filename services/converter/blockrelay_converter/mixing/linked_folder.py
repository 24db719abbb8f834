"""Makes a block folder of the files of other block folders, by hard links instead of copies."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import MANIFEST_NAME, FileSpec, Manifest, check_manifest
from blockrelay.block_folder.model import Precision, graph_kinds
from blockrelay.block_folder.precisions import all_exact
from blockrelay.errors import BlockFolderError
from blockrelay_converter.quantisation.calibration_record import REPORT_NAME, read_record


def link_mix(parts: Sequence[BlockFolder], precisions: Sequence[Precision], out: Path) -> Manifest:
    """Fills the folder `out` with hard links and a manifest of its own, which it returns.

    `precisions` has one entry per block. Each block comes from the first of `parts` that has it in that precision;
    tokenizer, rotary tables and the like come from `parts[0]`. `parts` are conversions of one checkpoint on the file
    system of `out`, with one calibration text or none. Together they have each block in its precision, and all graphs
    of the mix. `out` exists and must not have any of these files. Raises BlockFolderError for parts in two bases, whose
    blocks do not fit together.
    """
    if len(bases := {part.manifest.basis for part in parts}) > 1:
        raise BlockFolderError(f"the residual stream is in two bases, {' and '.join(sorted(bases))}: convert again")
    main = parts[0].manifest
    own = {*main.graphs.values(), *(block.file for block in main.blocks)}
    sources = {path: parts[0] for path in main.files if path not in own}
    graphs: dict[str, str] = {}
    for kind in graph_kinds(precisions):
        part = next(part for part in parts if kind in part.manifest.graphs)
        graphs[kind] = part.manifest.graphs[kind]
        sources[graphs[kind]] = part
    blocks = []
    for index, precision in enumerate(precisions, 1):
        part = next(part for part in parts if part.manifest.precision_of(index) == precision)
        blocks.append(part.manifest.block(index))
        sources[blocks[-1].file] = part
    files: dict[str, FileSpec] = {}
    for path, part in sorted(sources.items()):
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        os.link(part.root / path, out / path)
        files[path] = part.manifest.files[path]
    manifest = replace(
        main,
        precisions=tuple(precisions),
        exact=all_exact(precisions),
        graphs=graphs,
        blocks=tuple(blocks),
        files=files,
    )
    check_manifest(manifest)
    (out / MANIFEST_NAME).write_bytes(manifest.encode())
    record = read_record(parts[0].root, main)
    if record is not None:
        mixed = {
            block.index: own.blocks[block.index]
            for block in blocks
            if (own := read_record(sources[block.file].root, sources[block.file].manifest)) is not None
        }
        (out / REPORT_NAME).write_bytes(replace(record, blocks=mixed).encode())
    return manifest
