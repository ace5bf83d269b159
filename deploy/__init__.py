"""What runs beside a server: Prometheus with its rules, Grafana with its dashboard."""
