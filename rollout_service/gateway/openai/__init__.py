"""Chats as OpenAI and Anthropic define them: vLLM's own server classes over this service's dispatcher."""
