"""OpenAI's HTTP API in front of the router."""
