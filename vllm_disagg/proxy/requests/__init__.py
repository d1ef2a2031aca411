"""Serves one request from its body to the last byte of its answer; and the API of admins.

api -> admin, relay -> plans, legs, delivery, forward -> leg_answers -> attempt
    -> bodies, completeness, failover, first_content -> streams -> named_events -> continuation
    -> choice_events

Each name is a file, and imports only names to its right.
"""
