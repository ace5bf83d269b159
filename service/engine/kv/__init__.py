"""KV-cache accounting and memory, in plain ints and arrays: which row holds what, within which budget."""
