"""The battery of `splitwave certify`: what is done to a group before it may be trusted."""
