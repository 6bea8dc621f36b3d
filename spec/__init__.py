"""The nouns that measure, calibrate and simulate share. Imports nothing else of this project."""
