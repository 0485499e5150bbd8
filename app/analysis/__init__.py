"""Pure functions from a run's tables to view models; no files, no Textual."""
