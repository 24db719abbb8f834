"""The worker service: it runs one stage (consecutive blocks of a model) on batches of tokens of several requests."""

import os

# ONNX Runtime sends telemetry to its maker, by default since 1.29, and writes an identifier to disk. Only this
# variable, set before the library is loaded, prevents both: `disable_telemetry_events()` comes too late.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
