"""The what-if engine: re-runs a workload with options changed, and says what that is worth and how sure it is."""
