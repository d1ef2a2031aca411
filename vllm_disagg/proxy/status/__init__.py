"""The status page: one page, a JSON document, and a feed of it."""
