"""The engine: synchronous, transport-free, one step at a time."""

import os

# On import, ONNX Runtime sends telemetry and keeps an id in the user's cache folder. Only this variable prevents it;
# `session` turns off the rest.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # noqa: TID251 (not the server's own)
