"""Requests in flight: the event loop's side (`async_engine`, `stream`, `model_queue`) and the engine thread."""
