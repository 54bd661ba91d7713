"""Between the core's words and the contract's messages, both ways."""
