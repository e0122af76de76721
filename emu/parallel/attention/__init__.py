"""Attention as a merge of blocks: which queries meet which keys, the maths of one block, and a tiled kernel step by step."""
