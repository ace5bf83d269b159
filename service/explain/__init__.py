"""Attention weights of one request: computed by the explain graph, and drawn."""
