"""What a trainer does with an update, the same for every backend."""
