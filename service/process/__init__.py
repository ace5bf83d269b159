"""The process itself: garbage collection, huge pages, and the pool of processes for texts."""
