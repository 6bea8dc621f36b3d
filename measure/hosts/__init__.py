"""The hosts of a run: what they are, how they find each other, the processes led on them."""
