"""`costlab codec`: what each checkpoint codec does to given tensors."""
