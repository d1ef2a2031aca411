"""Meters, metrics, spans and the access log."""
