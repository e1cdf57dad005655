"""Every panel and alert against a running service and a real Prometheus: ``python -m dashboards.check``."""
