"""Prefill and decode on separate pools of inference engines: the shared library."""
