"""One process: serve, health, configuration, logs, metrics."""
