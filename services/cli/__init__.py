"""The `splitwave` command."""
