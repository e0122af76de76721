"""The first pipeline of a process has the trace of every other: in a process of its own."""

import subprocess
import sys

PROGRAM = """
import torch
import emu
from emu.models import Config, Decoder
from emu.parallel import Pipeline

def train(rank):
    torch.manual_seed(0)
    pipe = Pipeline(Decoder(Config(2, 4, 2, vocab=5, seq=3, dropout=0.1)), rank, microbatches=2)
    x = torch.zeros(2, 3, dtype=torch.int64)
    pipe.backward(emu.Batch(x, x))

first, second = (emu.launch(train, emu.Mesh(pp=2)).trace.events for _ in "12")
print(first == second, "torch._dynamo" in __import__("sys").modules)
"""


def test_what_torch_imports_on_the_way_holds_on_to_no_tensor():
    """torch imports much at its first dropout of a shape, and leaves the stack of that call in a cycle."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["True", "True"], done.stderr
