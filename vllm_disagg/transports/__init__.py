"""Transports: how messages and KV bytes move between workers."""
