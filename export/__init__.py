"""From a checkpoint to an artifact: ONNX graphs, golden cases, proof."""

import os

# As in `service.engine`: before ONNX Runtime is imported, which reports its use to its makers from then on.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # noqa: TID251 (not the server's own)
