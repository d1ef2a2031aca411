"""Permissions between engines and proxies: the fleet key, grants, registration."""
