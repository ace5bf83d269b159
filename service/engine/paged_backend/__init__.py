"""The graphs over blocks: K/V in blocks of a pool, shared by block tables."""
