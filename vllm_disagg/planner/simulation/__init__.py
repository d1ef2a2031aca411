"""Workloads, replicas and whole deployments, simulated event by event."""
