"""From a checkpoint to an artefact: ONNX graphs, golden cases, proof."""
