"""All-reduce schedules over torch.distributed, their cost model, planner and simulator.

Torch-free: plan, program, segmented, topology, cost, simulator, planner, seed_table, errors.
With torch: communicator (the entry point), executor, symmetric, hooks, compat.
"""
