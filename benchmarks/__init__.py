"""Measurements and the end-to-end demo: everything here runs the real parts and prints what it found."""
