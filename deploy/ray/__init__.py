"""The server as a Ray Serve deployment: `python -m deploy.ray` starts it with two replicas (extra `ray`)."""
