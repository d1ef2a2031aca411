"""Planner of placements: latency models, a simulator, a search, a report.

Imports nothing of the proxy, the launcher or the protocol: it plans them, it does not run them.
"""
