"""Accuracy through the gateway: a task of our own, run by lm-evaluation-harness."""
