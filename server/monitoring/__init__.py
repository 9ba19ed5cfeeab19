"""The Grafana dashboard, Prometheus' alerts and their configuration, made from the table of metrics.

``python -m server.monitoring deploy/`` writes them. Nothing that serves imports this package.
"""
