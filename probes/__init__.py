"""What runs beside the training step: launcher and records (torch-free), worker and measurements (torch)."""
