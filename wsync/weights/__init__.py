"""What weights are: found in a model, planned, packed, and put into another one."""
