"""Grafana dashboards, alert rules and what starts them: docs/dashboards.md."""
