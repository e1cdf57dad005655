"""The Serve replica around one vLLM engine. It generates, follows the weight log, and reports its state."""
