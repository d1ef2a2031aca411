"""HTTP towards clients and instances. Knows no fleet: connections, heads, streams, paths,
addresses.
"""
