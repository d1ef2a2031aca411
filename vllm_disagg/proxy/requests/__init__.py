"""One request from its body to the last byte of its answer, and the API of clients and admins."""
