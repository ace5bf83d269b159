"""The dashboard, as a program that writes it and as the file that Grafana reads."""
