"""What a request costs and how long it takes, before it runs: admission and deadlines rest on it."""
