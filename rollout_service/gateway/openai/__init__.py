"""OpenAI's and Anthropic's chat APIs: vLLM's server classes on top of this service's dispatcher."""
