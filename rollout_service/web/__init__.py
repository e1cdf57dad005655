"""What every HTTP surface of the service shares: error replies and authorization."""
