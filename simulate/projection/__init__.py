"""One request simulated, with intervals and provenance, and what is made of it."""
