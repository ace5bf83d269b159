"""Load: what a running server bears, and how it answers under it. Measures a black box over the wire.

Two ways to the same figures: `python -m loadtest bench` (asyncio, one command) and `locustfile.py` (Locust: web UI,
several processes, several machines). Both send the same seeded requests at the same seeded times, and both account for
every request: offered = finished + refused + failed + cancelled.
"""
