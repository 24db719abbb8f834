"""Refuses folders and files that are no checkpoint with safetensors, with the remedy for each kind."""

from pathlib import Path

from blockrelay.block_folder.hub_cache import is_repository
from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import UsageError

_PYTORCH = ("pytorch_model*.bin", "*.pth", "*.pt", "*.ckpt", "*.bin")
ADAPTER_NAME = "adapter_config.json"
_GGUF = "is GGUF, which is rounded already: convert the checkpoint with safetensors that it was made of"


def refuse_other_folders(place: Path) -> None:
    """Raises UsageError, with the remedy, if `place` is not a folder with a config.json.

    These have messages of their own, and are refused even beside a config.json: the root of a cached repository, and an
    adapter or a GGUF file in a folder without model*.safetensors.
    """
    if not place.is_dir():
        raise UsageError(_no_folder(place))
    if (place / "snapshots").is_dir() and (is_repository(place) or not (place / "config.json").exists()):
        raise UsageError(_root_of_snapshots(place))
    has_config, has_weights = (place / "config.json").is_file(), any(place.glob("model*.safetensors"))
    if (place / ADAPTER_NAME).exists() and not (has_config and has_weights):
        raise UsageError(_adapter(place))
    if not has_weights and (files := sorted(place.glob("*.gguf"))):
        raise UsageError(f"{files[0]} {_GGUF}")
    if not has_config:
        raise UsageError(f"{place} holds no config.json: give the folder of a checkpoint as Hugging Face has them")


def refuse_other_weights(folder: Path) -> None:
    """Always raises UsageError, with the remedy, for a folder in which the caller has found no model.safetensors.

    The message tells pickles of PyTorch, safetensors of other names, and folders without weights apart.
    """
    pickle = next((path for pattern in _PYTORCH for path in sorted(folder.glob(pattern))), None)
    if pickle is not None:
        raise UsageError(
            f"{pickle} is a pickle of PyTorch, which runs code when it is read: make safetensors of it with "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUT) of transformers"
        )
    others = sorted(folder.glob("*.safetensors"))
    named = f", but {others[0].name}" if others else ""
    raise UsageError(
        f"{folder} holds neither model.safetensors nor model.safetensors.index.json{named}: download all files of the "
        "checkpoint, in the layout of Hugging Face"
    )


def _no_folder(place: Path) -> str:
    if place.suffix == ".gguf":
        return f"{place} {_GGUF}"
    if place.exists():
        return f"{place} is not a folder: give the one that holds config.json"
    is_name = not place.is_absolute() and len(place.parts) == 2 and ".." not in place.parts
    download = f": `hf download {place}` of huggingface_hub says where it puts such a model" if is_name else ""
    return f"{place} is not a folder{download}"


def _root_of_snapshots(place: Path) -> str:
    """Returns the refusal of a cached repository: it names the snapshot of `main`, else the last one."""
    snapshots = sorted(path for path in (place / "snapshots").iterdir() if path.is_dir())
    main = place / "refs" / "main"
    revision = main.read_text().strip() if main.is_file() else ""
    chosen = next((path for path in snapshots if path.name == revision), snapshots[-1] if snapshots else None)
    instead = f"give {chosen}" if chosen else "it has no snapshot: download the model"
    return f"{place} is a repository in Hugging Face's cache, not a checkpoint: {instead}"


def _adapter(place: Path) -> str:
    fields = Fields.parse((place / ADAPTER_NAME).read_bytes(), ADAPTER_NAME, UsageError)
    name = "base_model_name_or_path"
    base = f" of {fields.text(name)}" if fields.has(name) else ""
    return (
        f"{place} is an adapter{base}, not a model: put it into the model with merge_and_unload() of peft, and convert "
        "what save_pretrained() of that writes"
    )
