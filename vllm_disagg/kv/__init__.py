"""The KV cache of a rank: its layout, extents of it, resharding, memory.  Independent of the protocol."""
