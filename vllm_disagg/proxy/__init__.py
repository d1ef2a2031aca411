"""The proxy: one OpenAI-compatible address in front of prefill and decode instances.

main -> api -> relay -> (admission, pairing, fleet, bodies, upstream, metrics); `server` and `upstream` speak HTTP
and know nothing of fleets.  Decisions are pure: failover, pairing, policies, continuation, bodies, fleet.
"""
