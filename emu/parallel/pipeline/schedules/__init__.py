"""Every schedule by its name. Each is a generator: (rank, ranks, microbatches, chunks) -> that rank's actions."""
