"""Onward's own wire contract."""
