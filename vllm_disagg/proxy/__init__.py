"""The proxy: one OpenAI-compatible address in front of prefill and decode instances.

main -> requests -> settings -> workers -> membership, telemetry -> routing -> http

Each of these is a folder, or a file, and imports only what stands to its right. `requests/relay.py`
runs one request. Decisions are pure: failover, pairing, policies, continuation, fleet.
"""
