"""Training steps, each case in processes of its own."""
