"""All-reduce schedules over torch.distributed and their cost model."""
