"""Metrics, traces and recorded steps: what the server reports of itself. Changes nothing of what it reports on."""
