"""What the service costs and gives, measured against the other side in the same run."""
