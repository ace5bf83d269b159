"""Logits to tokens to text: transforms, sampling, beam search, stop strings."""
