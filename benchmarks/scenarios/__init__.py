"""One module for each measurement; `python -m benchmarks list` prints them."""
