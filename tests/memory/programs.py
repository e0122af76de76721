"""Random small training programs: lists of instructions on numbered tensors and layers, made by hypothesis."""

from __future__ import annotations

import gc
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from emu.spmd.errors import EmuError

ROWS, WIDTH = 4, 8
_pick = st.integers(0, 7)
_small = st.integers(1, 12)

steps = st.one_of(
    st.tuples(st.just("new"), _small),
    st.tuples(st.just("linear"), _pick, st.sampled_from(["relu", "gelu", "tanh", "none"])),
    st.tuples(st.just("norm"), _pick),
    st.tuples(st.just("block"), _pick, st.booleans()),  # checkpointed, of either kind
    st.tuples(st.just("view"), _pick, st.sampled_from(["t", "row", "flat", "expand", "column"])),
    st.tuples(st.just("inplace"), _pick, st.sampled_from(["add_", "mul_", "relu_", "zero_"])),
    st.tuples(st.just("pointwise"), _pick, st.sampled_from(["exp", "tanh", "scale", "square", "softmax"])),
    st.tuples(st.just("detach"), _pick),
    st.tuples(st.just("clone"), _pick),
    st.tuples(st.just("leaf"), _pick),
    st.tuples(st.just("swap"), _pick),
    st.tuples(st.just("resize"), _small, _small, st.booleans()),
    st.tuples(st.just("no_grad"), _pick),
    st.tuples(st.just("kept"), _pick),
    st.tuples(st.just("drop"), _pick),
    st.tuples(st.just("cycle"), _small),
    st.tuples(st.just("backward"), _pick, st.booleans()),
    st.tuples(st.just("by_hand"), _pick),
    st.tuples(st.just("step"), st.sampled_from(["adamw", "adamw_foreach", "momentum", "sgd"])),
    st.tuples(st.just("zero_grad"), st.booleans()),
)
programs = st.lists(steps, min_size=3, max_size=24)


class Doubled(torch.autograd.Function):
    """Keeps its result for backward, though torch would not have to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x * 3)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (kept,) = ctx.saved_tensors
        return grad * 2 + kept * 0


class Interpreter:
    """Carries a program out. What autograd forbids (changing what backward needs) is skipped, as a person would."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.tensors: list[torch.Tensor] = [torch.randn(ROWS, WIDTH)]
        self.layers: list[nn.Module] = []
        self.optimizers: dict[str, Any] = {}

    def run(self, program: list[tuple[Any, ...]]) -> None:
        for name, *arguments in program:
            try:
                getattr(self, name)(*arguments)
            except EmuError:
                raise
            except RuntimeError:
                pass

    def _at(self, i: int) -> torch.Tensor:
        if not self.tensors:
            self.new(1)
        return self.tensors[i % len(self.tensors)]

    def _input(self, i: int) -> torch.Tensor:
        """[rows, width], whatever the tensor's own shape."""
        x = self._at(i).reshape(-1)
        return torch.cat([x, x.new_zeros(WIDTH - x.numel() % WIDTH)]).view(-1, WIDTH)[: 2 * ROWS]

    def _layer(self, layer: nn.Module) -> nn.Module:
        self.layers.append(layer)
        self.optimizers.clear()
        return layer

    def new(self, rows: int) -> None:
        self.tensors.append(torch.randn(rows, WIDTH))

    def linear(self, i: int, after: str) -> None:
        y = self._layer(nn.Linear(WIDTH, WIDTH))(self._input(i))
        self.tensors.append(y if after == "none" else getattr(nn.functional, after)(y))

    def norm(self, i: int) -> None:
        self.tensors.append(self._layer(nn.LayerNorm(WIDTH))(self._input(i)))

    def block(self, i: int, reentrant: bool) -> None:
        layer = self._layer(nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)))
        self.tensors.append(checkpoint(layer, self._input(i), use_reentrant=reentrant))  # type: ignore[arg-type]

    def view(self, i: int, how: str) -> None:
        x = self._at(i)
        views = {
            "t": lambda: x.transpose(0, -1),
            "row": lambda: x[1:],
            "flat": lambda: x.view(-1),
            "expand": lambda: x.unsqueeze(0).expand(2, *x.shape),
            "column": lambda: x[..., :3],
        }
        self.tensors.append(views[how]())

    def inplace(self, i: int, how: str) -> None:
        x = self._at(i)
        getattr(x, how)(*([2.0] if how in ("add_", "mul_") else []))

    def pointwise(self, i: int, how: str) -> None:
        x = self._at(i)
        functions = {"scale": lambda: x * 0.5 + 1, "square": lambda: x * x, "softmax": lambda: x.softmax(-1)}
        self.tensors.append(functions[how]() if how in functions else getattr(x, how)())

    def detach(self, i: int) -> None:
        self.tensors.append(self._at(i).detach())

    def clone(self, i: int) -> None:
        self.tensors.append(self._at(i).clone())

    def leaf(self, i: int) -> None:
        self.tensors.append(nn.Parameter(self._at(i).detach().clone()))

    def swap(self, i: int) -> None:
        x = self._at(i)
        x.data = torch.randn(x.shape)

    def resize(self, before: int, after: int, storage: bool) -> None:
        x = torch.zeros(before, WIDTH)
        if storage:
            x.untyped_storage().resize_(0)
            x.untyped_storage().resize_(max(before, after) * WIDTH * x.element_size())
        else:
            x.resize_(after, WIDTH)
        self.tensors.append(x.zero_())

    def no_grad(self, i: int) -> None:
        with torch.no_grad():
            self.tensors.append((self._at(i) + 1).sigmoid())

    def kept(self, i: int) -> None:
        self.tensors.append(Doubled.apply(self._at(i)))  # type: ignore[arg-type]

    def drop(self, i: int) -> None:
        if self.tensors:
            del self.tensors[i % len(self.tensors)]

    def cycle(self, rows: int) -> None:
        ring: list[Any] = [torch.randn(rows, WIDTH)]
        ring.append(ring)

    def collect(self) -> None:
        gc.collect()

    def backward(self, i: int, retain: bool) -> None:
        self._at(i).sum().backward(retain_graph=retain)

    def by_hand(self, i: int) -> None:
        x = self._at(i)
        if x.requires_grad and x.is_leaf:
            x.grad = torch.ones(x.shape)

    def step(self, kind: str) -> None:
        parameters = [p for layer in self.layers for p in layer.parameters()]
        if parameters and kind not in self.optimizers:
            make = {
                "adamw": lambda: torch.optim.AdamW(parameters, foreach=False),
                "adamw_foreach": lambda: torch.optim.AdamW(parameters, foreach=True),
                "momentum": lambda: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
                "sgd": lambda: torch.optim.SGD(parameters, lr=0.01),
            }
            self.optimizers[kind] = make[kind]()
        if kind in self.optimizers:
            self.optimizers[kind].step()

    def zero_grad(self, to_none: bool) -> None:
        for layer in self.layers:
            layer.zero_grad(set_to_none=to_none)


def interpreted(program: list[tuple[Any, ...]]) -> Any:
    """The program as a function of a rank, which ends with everything still alive."""

    def body(rank: Any) -> None:
        machine = Interpreter()
        machine.run(program)

    return body
