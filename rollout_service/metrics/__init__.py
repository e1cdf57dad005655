"""Prometheus metrics of the service; docs/metrics.md explains scraping and each metric."""
