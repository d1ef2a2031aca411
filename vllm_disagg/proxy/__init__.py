"""Serves one OpenAI-compatible address in front of prefill and decode instances: the proxy.

main -> serving -> requests -> settings -> workers -> membership, telemetry -> routing -> http

Each name is a folder or a file, and imports only names to its right. `requests/relay.py` runs one
request. Decisions are pure: failover, pairing, policies, continuation, fleet.
"""
