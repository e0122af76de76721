"""Choosing how to spread a training run, and knowing beforehand how long a step takes and what must fit in memory."""
