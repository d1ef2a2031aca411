"""Ways to carry messages and KV bytes between workers."""
