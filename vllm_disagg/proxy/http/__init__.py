"""Implements HTTP towards clients and instances: connections, heads, streams, paths and addresses.

Imports nothing of the fleet or of routing.
"""
