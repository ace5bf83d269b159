"""Garbage collection, huge pages, and thread pools for work on text."""
