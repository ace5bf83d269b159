"""gRPC: protobuf in, protobuf out, errors to statuses."""
