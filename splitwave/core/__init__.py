"""Pure decisions: no I/O, clock, event loop or randomness."""
