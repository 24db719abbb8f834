"""The text of `blockrelay --version`: the release, the protocol numbers, and the numerics id of this machine."""

import importlib.util

from blockrelay import __version__
from blockrelay.extras import how_to_install
from blockrelay.host.child_command import module_command, run_command
from blockrelay.protocol.number import NUMBERS
from blockrelay.settings import BUNDLED_MODEL


def version_text() -> str:
    """Returns three lines: release, protocols, numerics id.

    The numerics id is that of the bundled model on this machine; each block folder has its own. If it is unknown, the
    line says why.
    """
    return f"blockrelay {__version__}\nprotocol {NUMBERS}\nnumerics {_bundled_numerics()}"


def _bundled_numerics() -> str:
    if importlib.util.find_spec("onnxruntime") is None:
        return f"unknown: onnxruntime is not installed ({how_to_install('worker')})"
    done = run_command(module_command("blockrelay_worker.offline.numerics", BUNDLED_MODEL))
    if done.code:
        return f"unknown: {done.last_line}"
    return f"{done.stdout.strip()} (bundled model)"
