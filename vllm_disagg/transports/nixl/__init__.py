"""NIXL transport: KV by reads of remote memory."""
