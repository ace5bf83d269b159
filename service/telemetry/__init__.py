"""Metrics, traces and the flight recorder. They observe the server and change nothing."""
