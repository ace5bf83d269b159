"""Other programs that run beside a measured server: Envoy, Prometheus, Ray Serve, and servers without a model."""
