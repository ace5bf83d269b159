"""What `benchmarks.gpu_check` consists of: its parts, what they share, and the report."""
