"""The paged backend: K/V in blocks of a pool, addressed by block tables."""
