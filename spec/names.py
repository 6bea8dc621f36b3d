"""What a system and a run may be called: they are folders under results/."""

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
MOST_NAME = 80
