"""The KV cache of a rank: layout, extents, resharding, memory.  Independent of the protocol."""
