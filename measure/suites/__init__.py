"""The suites: what each measures, a case at a time."""
