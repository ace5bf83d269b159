"""KV-cache accounting and memory: rows, blocks, the prefix cache, budgets."""
