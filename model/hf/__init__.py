"""Checkpoints in Hugging Face's layout made ours: read, checked whole, and only then written."""
