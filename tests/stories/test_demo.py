"""The first thing that anybody runs: one command, a text streams, a table says what it took, nothing is left."""

import os
import subprocess
import tempfile
from pathlib import Path

from tests.support.models.tiny_model import write_tiny_model
from tests.support.systems.up_process import COMMAND

#: Proxies that nobody runs: what the demo calls is its own.
NO_PROXY_THERE = {
    "NO_PROXY": "", "HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9",
}  # fmt: skip


def _in_shared_memory() -> set[str]:
    """What lies in /dev/shm, folders of pages aside: those of other tests come and go."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("blockrelay-")}


def test_the_demo_streams_a_text_and_shows_a_table_and_leaves_nothing(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path)
    before = _in_shared_memory()
    argv = [*COMMAND, "demo", "--model", str(model), "--stages", "3"]
    with tempfile.TemporaryDirectory(prefix="br-demo-") as folder:  # short: sockets lie in it
        env = {**os.environ, "TMPDIR": folder, "COLUMNS": "120", **NO_PROXY_THERE}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        assert os.listdir(folder) == []
    text, _, table = done.stdout.partition("what it took")
    assert text.startswith("> Tell me a story.\n\n") and len(text) > 100
    for row in ("tiny (llama, 4 layers, hidden 64)", "w8a8, exact", "3 (5 blocks)", "256 (finish reason: length)"):
        assert row in table
    for row in ("prompt tokens", "time to first token", "tokens per second", "numerics id"):
        assert row in table
    assert _in_shared_memory() == before
