"""Messages between trainer, gateway, ingest, replicas and monitor. No module here imports torch, vllm or ray."""
