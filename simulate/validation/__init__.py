"""Measured steps beside their simulation; forecasts sealed beforehand, and their record."""
