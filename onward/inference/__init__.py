"""Stubs of the Open Inference Protocol, generated: `python -m proto.generate`."""
