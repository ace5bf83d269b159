"""The server: gRPC in front, one engine thread behind."""
