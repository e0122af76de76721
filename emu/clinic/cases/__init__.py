"""The cases: one file each, named by number and fault."""
