"""Opens the block folder of a draft model, and checks that it can guess tokens of the served model."""

from pathlib import Path

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.manifest import TOKENIZER_NAME
from blockrelay.errors import UsageError


def open_draft(path: Path, folder: BlockFolder) -> BlockFolder:
    """Returns the draft model in `path` for the model in `folder`. No weights are read.

    Raises UsageError, one line, for ONNX blocks made by others and for another vocabulary or tokenizer: token ids must
    mean the same in both. Raises BlockFolderError for a folder that cannot be opened.
    """
    draft = open_block_folder(path, blocks=[])
    if (why := _difference(folder, draft)) is not None:
        raise UsageError(
            f"{path} cannot draft for {folder.root}: {why}. A draft model is a block folder with the same tokenizer"
        )
    return draft


def _difference(folder: BlockFolder, draft: BlockFolder) -> str | None:
    """Returns what keeps one model from guessing tokens of the other, in words; None if nothing does."""
    if folder.model.onnx_blocks is not None or draft.model.onnx_blocks is not None:
        return "ONNX blocks made by others neither draft nor take drafts of another model"
    if not folder.manifest.exact:
        return f"no tokens are guessed for the precision {folder.manifest.precision}, which is not exact"
    mine, theirs = folder.model.vocab_size, draft.model.vocab_size
    if mine != theirs:
        return f"its vocabulary has {theirs} tokens, not {mine}"
    tokenizers = [one.manifest.files.get(TOKENIZER_NAME) for one in (folder, draft)]
    if tokenizers[0] != tokenizers[1]:
        return "it has another tokenizer"
    return None
