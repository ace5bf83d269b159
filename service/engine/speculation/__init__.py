"""Speculative decoding: draft tokens that the model verifies."""
