"""ONNX Runtime, wrapped: sessions, providers, and the memory of their weights."""
