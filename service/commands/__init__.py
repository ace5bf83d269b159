"""The client side of the command line: `ask`, `chat`, `health`, `explain`, `trace`, and their connection."""
