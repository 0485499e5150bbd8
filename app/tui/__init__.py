"""The Textual application: screens, panes, widgets and messages."""
