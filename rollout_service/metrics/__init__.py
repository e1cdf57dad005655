"""What the service tells Prometheus; docs/metrics.md says how to scrape it and what each metric means."""
