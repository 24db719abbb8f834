"""Log lines have one shape, whatever the caller knew."""

import json
import subprocess
import sys

PROGRAM = """
from blockrelay.observability import logs
logs.configure("INFO", node_id="node-1")
logs.get().info("STEP", request_id="req-1", session_id="s", step=2, traceparent=None, tokens=3)
logs.get().info("STEP", traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
"""


def test_what_identifies_a_line_stands_on_top_and_the_rest_under_data() -> None:
    """In a process of its own: logging is configured once per process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    line, traced = map(json.loads, done.stderr.splitlines())
    assert list(line) == ["timestamp", "level", "event_type", "node_id", "request_id", "session_id", "step", "data"]
    assert line["data"] == {"tokens": 3}
    assert traced["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
