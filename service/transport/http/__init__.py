"""HTTP in the shape of OpenAI's API: a second transport of `service.generator`, beside gRPC, on the same event loop."""
