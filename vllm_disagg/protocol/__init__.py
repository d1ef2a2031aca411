"""Protocol of a transfer.  Does no I/O: the driver and the connector carry out its actions.

    messages, events, peers, reasons               plain values; messages are those on the wire
    sender, receiver (with lookup and read_plan)   machines of one rank
    legs (request_leg, prefill_leg, decode_leg)    machine of an engine's scheduler

Rules, states and theory are at the head of each file.
"""

# Nothing is imported here: each name has one place, and the import contracts name modules.
