"""The Serve replica around one vLLM engine: it generates, follows the weight log, and says how it is."""
