"""KV by one-sided reads with NIXL."""
