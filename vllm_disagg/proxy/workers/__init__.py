"""Runs several processes that serve one port: their supervisor, and the bus between them."""
