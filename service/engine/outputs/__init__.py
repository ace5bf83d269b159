"""Outputs of live requests: extended by a step's results, reported as events, and ended."""
