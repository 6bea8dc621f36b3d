"""What a step draws, how warm GPUs get, and what another cap or inlet would change."""
