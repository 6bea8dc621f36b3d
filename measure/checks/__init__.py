"""Are sensors true, and what does reading them cost? The suite `telemetry`."""
