"""Predicted against measured: what emu says of published runs and collectives, and what they really took."""
