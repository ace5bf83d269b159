"""The slots backend: K/V in one contiguous row per running sequence."""
