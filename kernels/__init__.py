"""What makes a training step cheaper: fused kernels, collective schedules, checkpoint codecs."""
