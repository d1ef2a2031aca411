"""How many prefill and decode instances, with which parallelism: latency models, a simulator, a
search, a report.

Imports nothing of the proxy, the launcher or the protocol: it plans them, it does not run them.
"""
