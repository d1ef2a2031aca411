"""Scenarios and placements, the search for the best placement, and the advice that follows."""
