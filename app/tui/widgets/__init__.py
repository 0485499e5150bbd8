"""Widgets that draw view models a line at a time."""
