"""Data sets: the two that need no files, readers of those that do, and how examples become batches."""
