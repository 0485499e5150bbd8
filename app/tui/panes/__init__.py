"""The panes, one module each; `registry` lists them in tab order."""
