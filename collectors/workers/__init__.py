"""The trainer's side of worker processes: their connections, their lifecycle, and how batches are gathered."""
