"""Messages between workers, and KV over ZMQ."""
