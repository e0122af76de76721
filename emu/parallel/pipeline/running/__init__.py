"""Carrying a schedule out: a model's stages on one rank, messages between ranks, and backwards in two parts."""
