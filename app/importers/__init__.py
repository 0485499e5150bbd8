"""Files recorded elsewhere, turned into the run format."""
