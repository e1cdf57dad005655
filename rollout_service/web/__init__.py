"""Error replies and authorization, shared by all HTTP routes."""
