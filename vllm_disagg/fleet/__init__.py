"""Who may talk to whom: the fleet key, grants, registration."""
