"""Finds instances, lets them join and leave the fleet, and probes whether they answer."""
