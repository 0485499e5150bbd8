"""Modal dialogs: each asks or tells one thing and returns a typed result."""
