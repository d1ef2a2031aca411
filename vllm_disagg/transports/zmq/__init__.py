"""Control channel and ZMQ transport."""
