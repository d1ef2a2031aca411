"""KV over plain TCP."""
