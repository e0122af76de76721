"""Flash attention as a tiled algorithm to step through: what is loaded, computed and stored, tile by tile.

    for step in FlashForward(q, k, v, sram_bytes=16_384):
        print(step)

Forward, a tile of queries stays in the core's memory while tiles of keys and values pass by. Every tile of scores is
used and forgotten: a running maximum m and a running sum l of exp(score - m) make the softmax right at the end, and when
m grows, what was summed so far shrinks by exp(old m - new m). Only the output and m + log l go back to memory.
Backward, a tile of keys and values stays and queries pass by; weights are computed again from scores and log-sum-exp.
Dao et al. 2022, https://arxiv.org/abs/2205.14135; the order of loops is that of Dao 2023, https://arxiv.org/abs/2307.08691.

Bytes count what a core asks of HBM: every query head loads its keys and values by itself, though a cache may answer.
All heads take each step together, each on a core of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from emu.parallel.attention.steps import Step, Walk
from emu.parallel.attention.tiles import H100_BLOCK_BYTES, Shape, Tiles, backward_bytes, forward_bytes, parts, tiles_for
from emu.parallel.attention.traffic import attention_flops, backward_traffic, forward_traffic


class FlashForward(Walk):
    """The forward pass, step by step. Afterwards `out` and `lse` are complete.

    Args:
        q: [batch, heads, queries, head_dim].
        k, v: [batch, kv_heads, keys, head_dim]; query head i reads head i // (heads / kv_heads).
        causal: query i sees keys 0 .. i. Tiles in which nothing is seen are left out.
        documents: [batch or 1, tokens] int64 on the host, or None.
        tiles: their sizes; None: the largest that fit sram_bytes.
        sram_bytes: memory of one core.
        scale: of the scores; 1 / sqrt(head_dim) where not given.

    Attributes:
        out: like q. lse: [batch, heads, queries], float32 at least.
        read_bytes, written_bytes: of HBM, so far.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = True,
        documents: Tensor | None = None,
        tiles: Tiles | None = None,
        sram_bytes: int = H100_BLOCK_BYTES,
        scale: float | None = None,
    ) -> None:
        shape = Shape.of(q, k, v, causal, documents)
        super().__init__(shape, tiles or tiles_for(shape, sram_bytes), scale)
        self.q, self.k, self.v = q, k, v
        self.out = torch.zeros_like(q)
        self.lse = torch.full(q.shape[:-1], -math.inf, dtype=self.wide, device=q.device)

    def steps(self) -> Iterator[Step]:
        shape, e, w = self.shape, self.shape.element_bytes, self.shape.sum_bytes
        for row in range(shape.batch):
            for at in parts(shape.queries, self.tiles.queries):
                yield from self._tile(row, at, e * shape.head_dim, w)

    def _tile(self, row: int, at: slice, token_bytes: int, w: int) -> Iterator[Step]:
        shape, rows = self.shape, at.stop - at.start
        q = self.by_group(self.q[row], at)  # [kv_heads, group, rows, head_dim]
        self.held(forward_bytes(rows, 0, shape.head_dim, shape.element_bytes, w))
        yield self.step("load Q", row, at, read=shape.heads * rows * token_bytes, Q=q)
        m = torch.full(q.shape[:-1], -math.inf, dtype=self.wide, device=q.device)
        total, out = torch.zeros_like(m), torch.zeros_like(q)
        for seen in parts(shape.keys, self.tiles.keys):
            if not shape.sees(row, at, seen):
                continue
            cols = seen.stop - seen.start
            self.held(forward_bytes(rows, cols, shape.head_dim, shape.element_bytes, w))
            k, v = self.shared(self.k[row], seen), self.shared(self.v[row], seen)
            yield self.step("load K, V", row, at, seen, read=2 * shape.heads * cols * token_bytes, K=k, V=v)
            scores = self.scores(q, k, row, at, seen)
            yield self.step("scores", row, at, seen, S=scores)
            larger = torch.maximum(m, scores.amax(-1))
            shift = larger.masked_fill(larger == -math.inf, 0.0)  # a query that has seen nothing yet
            weights, shrink = (scores - shift.unsqueeze(-1)).exp(), (m - shift).exp()
            total, before = total * shrink + weights.sum(-1), m
            m = larger
            yield self.step("softmax", row, at, seen, m=m, l=total, P=weights, shrink=shrink, old_m=before)
            out = out * shrink.unsqueeze(-1) + weights @ v
            yield self.step("output", row, at, seen, O=out)
        some = total.masked_fill(total == 0, 1.0)
        out, lse = out / some.unsqueeze(-1), m + some.log()
        self.out[row, :, at] = out.flatten(0, 1).to(self.out.dtype)
        self.lse[row, :, at] = lse.flatten(0, 1)
        yield self.step("store O", row, at, written=shape.heads * rows * (token_bytes + w), O=out, lse=lse)


class FlashBackward(Walk):
    """The backward pass, step by step. Afterwards `dq`, `dk`, `dv` are complete.

    dQ lies in HBM in float32 (float64) while tiles of keys add to it: the first writes it, others read and write it.

    Args:
        grad: of the output, [batch, heads, queries, head_dim].
        q, k, v, causal, documents, tiles, sram_bytes, scale: as for FlashForward.
        out, lse: what that gave.

    Attributes:
        dq, dk, dv: like q, k, v. read_bytes, written_bytes: of HBM, so far.
    """

    def __init__(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool = True,
        documents: Tensor | None = None,
        tiles: Tiles | None = None,
        sram_bytes: int = H100_BLOCK_BYTES,
        scale: float | None = None,
    ) -> None:
        shape = Shape.of(q, k, v, causal, documents)
        super().__init__(shape, tiles or tiles_for(shape, sram_bytes), scale)
        self.grad, self.q, self.k, self.v, self.out = grad, q, k, v, out
        self.lse = lse.masked_fill(lse == -math.inf, math.inf)  # exp(score - inf) = 0: such a row has no weights
        self.sums = torch.zeros(q.shape, dtype=self.wide, device=q.device)  # dQ while it grows
        self.delta = torch.zeros(q.shape[:-1], dtype=self.wide, device=q.device)
        self.dq, self.dk, self.dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def steps(self) -> Iterator[Step]:
        shape, e, w = self.shape, self.shape.element_bytes, self.shape.sum_bytes
        for row in range(shape.batch):
            visited: set[int] = set()
            for at in parts(shape.queries, self.tiles.back_queries):
                numbers = shape.heads * (at.stop - at.start)
                delta = (self.by_group(self.grad[row], at) * self.by_group(self.out[row], at)).sum(-1)
                self.delta[row, :, at] = delta.flatten(0, 1)
                read, written = 2 * numbers * shape.head_dim * e, numbers * w
                yield self.step("row sums", row, at, read=read, written=written, delta=delta)
            for seen in parts(shape.keys, self.tiles.back_keys):
                yield from self._tile(row, seen, visited, shape.head_dim * e, w)
            for at in parts(shape.queries, self.tiles.back_queries):
                numbers = shape.heads * (at.stop - at.start) * shape.head_dim
                self.dq[row, :, at] = self.sums[row, :, at].to(self.dq.dtype)
                if at.start not in visited:
                    yield self.step("store dQ", row, at, written=numbers * e)
                elif e < w:
                    yield self.step("round dQ", row, at, read=numbers * w, written=numbers * e)

    def _tile(self, row: int, seen: slice, visited: set[int], token_bytes: int, w: int) -> Iterator[Step]:
        shape, cols = self.shape, seen.stop - seen.start
        k, v = self.shared(self.k[row], seen), self.shared(self.v[row], seen)
        self.held(backward_bytes(0, cols, shape.head_dim, shape.element_bytes, w))
        yield self.step("load K, V", row, None, seen, read=2 * shape.kv_heads * cols * token_bytes, K=k, V=v)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for at in parts(shape.queries, self.tiles.back_queries):
            if not shape.sees(row, at, seen):
                continue
            rows = at.stop - at.start
            self.held(backward_bytes(rows, cols, shape.head_dim, shape.element_bytes, w))
            q, grad = self.by_group(self.q[row], at), self.by_group(self.grad[row], at)
            lse, delta = self.by_group(self.lse[row], at), self.by_group(self.delta[row], at)
            sums = shape.heads * rows * shape.head_dim * w
            again = sums if at.start in visited else 0
            visited.add(at.start)
            read = shape.heads * rows * 2 * (token_bytes + w) + again
            yield self.step("load Q, dO", row, at, seen, read=read, Q=q, dO=grad, lse=lse, delta=delta)
            weights = (self.scores(q, k, row, at, seen) - lse.unsqueeze(-1)).exp()
            yield self.step("weights", row, at, seen, P=weights)
            dscores = weights * (grad @ v.mT - delta.unsqueeze(-1))
            yield self.step("dS", row, at, seen, dS=dscores)
            dv = dv + (weights.mT @ grad).sum(1, keepdim=True)  # the heads of a group share their keys
            dk = dk + (dscores.mT @ q).sum(1, keepdim=True) * self.scale
            dq = self.by_group(self.sums[row], at) + (dscores @ k) * self.scale
            self.sums[row, :, at] = dq.flatten(0, 1)
            yield self.step("add", row, at, seen, written=sums, dQ=dq, dK=dk, dV=dv)
        self.dk[row, :, seen] = dk.squeeze(1).to(self.dk.dtype)
        self.dv[row, :, seen] = dv.squeeze(1).to(self.dv.dtype)
        yield self.step("store dK, dV", row, None, seen, written=2 * shape.kv_heads * cols * token_bytes, dK=dk, dV=dv)


Kernel = Callable[[str, int, int], AbstractContextManager[Any]]


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    documents: Tensor | None = None,
    tiles: Tiles | None = None,
    sram_bytes: int = H100_BLOCK_BYTES,
    scale: float | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Attention by the tiled algorithm; differentiable once. For learning: models use a fast kernel.

    Args:
        q, k, v, causal, documents, tiles, sram_bytes, scale: as for FlashForward.
        kernel: (name, flops, bytes) -> context in which each pass is one kernel: `rank.kernel`.

    Returns:
        like q.
    """
    return _Flash.apply(q, k, v, (causal, documents, tiles, sram_bytes, scale), kernel)


class _Flash(torch.autograd.Function):
    """forward: FlashForward in one kernel. backward: FlashBackward in another."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], kernel: Kernel | None) -> Tensor:
        shape = Shape.of(q, k, v, *options[:2])
        tiles = options[2] or tiles_for(shape, options[3])
        moved = forward_traffic(shape, tiles)
        with kernel("flash_attention", attention_flops(shape), sum(moved)) if kernel else nullcontext():
            walk = FlashForward(q, k, v, *options)
            walk.run()
        ctx.save_for_backward(q, k, v, walk.out, walk.lse)
        ctx.options, ctx.kernel = options, kernel
        return walk.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        shape = Shape.of(q, k, v, *ctx.options[:2])
        moved = backward_traffic(shape, ctx.options[2] or tiles_for(shape, ctx.options[3]))
        flops = 2 * attention_flops(shape)
        with ctx.kernel("flash_attention_backward", flops, sum(moved)) if ctx.kernel else nullcontext():
            walk = FlashBackward(grad, q, k, v, out, lse, *ctx.options)
            walk.run()
        return walk.dq, walk.dk, walk.dv, None, None
