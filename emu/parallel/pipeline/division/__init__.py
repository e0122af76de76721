"""Dividing a model into stages: by number, by name, by what its parts cost or hold."""
