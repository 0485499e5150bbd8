"""The terminal user interface: `run_tui` opens it. Reads view models and the event stream; measures nothing itself."""
