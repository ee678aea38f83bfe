"""What a worker does with an update, the same for every backend."""
