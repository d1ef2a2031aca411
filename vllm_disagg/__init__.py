"""Prefill/decode disaggregation for stock vLLM."""

__version__ = "0.1.0"
