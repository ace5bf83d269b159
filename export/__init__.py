"""From a checkpoint to an artifact: ONNX graphs, golden cases, proof."""

import os

# Before ONNX Runtime is imported: it sends telemetry otherwise.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # noqa: TID251 (not the server's own)
