"""The commands `plan` and `simulate`: flags, reports, and the look at a running deployment."""
