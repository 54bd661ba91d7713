"""Workloads, runners and the report made from their results."""
