"""The client side of the command line: `ask`, `explain`, `trace`, and their connection."""
