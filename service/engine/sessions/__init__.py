"""ONNX Runtime: sessions, the CPU and CUDA providers, device memory, and weights."""
