"""Measures requests: meters, metrics, spans and the access log."""
