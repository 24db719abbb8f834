"""Runs one stage of blocks on ragged batches."""

import os

# ONNX Runtime reports to its maker over the network, on by default since 1.29, and writes an identifier to disk. Only
# this variable, set before the library is loaded, stops all of it: `disable_telemetry_events()` comes too late.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
