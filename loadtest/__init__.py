"""Load tests: measure a running server over the wire, as a black box.

`core/` drives load from asyncio (`python -m loadtest bench`, `capacity`), `locust/` from Locust (`locustfile.py`: web
page, several processes, several machines), `scaling/` measures how time grows with length. Both drivers send the same
seeded requests at the same seeded times and account for each: offered = finished + refused + failed + cancelled.
"""
