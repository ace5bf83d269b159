"""The client side of the command line: `ask`, `health`, `explain`, `trace`, and their connection."""
