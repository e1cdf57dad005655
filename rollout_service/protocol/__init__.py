"""Every message between trainer, gateway, ingest, replicas and monitor, once, for both ends. No torch, vllm or ray."""
