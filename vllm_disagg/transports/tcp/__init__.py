"""TCP transport: KV over plain sockets."""
