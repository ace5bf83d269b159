"""Transformers in PyTorch: configuration, layers, data, training; its first rooms need no torch."""
