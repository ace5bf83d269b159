"""Stubs of the wire contract `onward.v1`, generated: `python -m proto.generate`."""
