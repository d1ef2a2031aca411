"""Runs at the start of each Python that a test with a planted fault starts."""

from planting import plant_inherited

plant_inherited()
