"""The router: one request, top to bottom, is in generate.py."""
