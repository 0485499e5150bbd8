"""Built-in training workloads and the loader of a user's own."""
