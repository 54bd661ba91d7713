"""Certification: the keys, what engines are recognised by, and the battery that proves a mode."""
