"""The engine: synchronous, transport-free, one step at a time."""
