"""Prometheus: its configuration and rules, and a program that writes these for its operator on Kubernetes."""
