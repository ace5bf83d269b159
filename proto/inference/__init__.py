"""The Open Inference Protocol, version 2, as the stubs of its own names."""
