"""Request traffic, for the planner and the bench: traces and distributions of lengths."""
