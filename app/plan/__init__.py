"""`costlab plan`: which all-reduce a machine should run, from its topology."""
