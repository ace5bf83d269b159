"""The transformer in PyTorch: layers, attention, positions, and a reference of plain loops."""
