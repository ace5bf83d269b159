"""The engine: synchronous, transport-free, one step at a time."""

import os

# From its import on ONNX Runtime reports its use to its makers, and keeps an id for that in the user's cache folder.
# Only what stands in the environment before keeps it from that; `session` turns off what may be left.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # noqa: TID251 (not the server's own)
