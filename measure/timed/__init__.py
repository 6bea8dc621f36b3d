"""What is timed on a device, and how."""
