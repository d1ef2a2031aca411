"""The protocol of a transfer: messages, events and the two machines.  Does no I/O."""
