"""Costs of hardware and models: step times, KV cache sizes and queueing formulas."""
