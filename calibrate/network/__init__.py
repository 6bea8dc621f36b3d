"""Collectives inside a node and between nodes: fitted, or published, or assumed."""
