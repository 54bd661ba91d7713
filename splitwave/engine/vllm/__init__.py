"""The engine port on vLLM: settings, launch and the step-batched adapter.

Importing this package imports no vLLM; `preload` and `start_group` do.
"""
