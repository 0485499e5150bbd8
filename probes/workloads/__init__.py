"""Built-in training workloads and the loader of a user's own.

A user's file offers `make(ctx: WorkloadContext)` and returns `(model, batches, loss)`, a dict of these, or a
`Workload` for full control.
"""
