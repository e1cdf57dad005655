"""HTTP routes with validation and authorization. Each API has its own file; the dispatcher chooses replicas."""
