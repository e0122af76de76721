"""What every style does to its module: the cutting itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from emu.parallel.tensor import mixtures
from emu.parallel.tensor import styles as s
from emu.parallel.tensor.arguments import first_of, with_first
from emu.parallel.tensor.cuts import Even, Heads, Parts, Ranges, shared_ranges, taken
from emu.parallel.tensor.held import Held, Kind, Sharding
from emu.parallel.tensor.linear import become_column, become_row, share_heads
from emu.parallel.tensor.pairs import check_pairs, check_ties, lies_in, unnamed
from emu.parallel.tensor.randomness import become_sharded_dropout, own_randomness, share_generators
from emu.parallel.tensor.region import Region
from emu.parallel.tensor.tokens import TokenCut
from emu.parallel.tensor.vocabulary import become_vocab_cross_entropy, become_vocab_embedding
from emu.spmd import Group, Layout, PlanError, Rank, Slices, gather_from


class Surgery:
    """The cutting of one model on one rank."""

    def __init__(self, model: nn.Module, rank: Rank, tp: Group, sp: bool, styles: dict[str, s.Style]) -> None:
        self.model, self.rank, self.tp, self.sp, self.styles = model, rank, tp, sp, styles
        self.done = Sharding(rank)
        self.names: dict[int, str] = {}  # parameter -> its first name
        self.cut: dict[int, tuple[int, tuple[Ranges, ...]]] = {}  # parameters that are cut over tp: dim, ranges
        self.tokens = self.done.tokens = TokenCut(tp) if sp else None
        self.below: dict[str, TokenCut] = {}  # mixtures of experts -> how tokens are cut below them
        self.regions: dict[str, Region] = {}
        everyone = self.done.everyone()
        for name, p in model.named_parameters():
            self.names[id(p)] = name
            self.done.shapes[name] = tuple(p.shape)
        if everyone.size > 1:
            for t in (*model.parameters(), *model.buffers()):
                everyone.broadcast(t.data, name="initial values")
        if tp.size > 1:
            share_generators(rank, tp)
        self.has_experts = False
        self._apply()
        if not self.has_experts and (extra := {a: n for a, n in rank.mesh.folds.items() if a != "edp" and n > 1}):
            axis, n = next(iter(extra.items()))
            raise PlanError(
                f"{axis}={n}, but {type(model).__name__} has no experts to share out",
                f"leave {axis} out, or name the module that holds the experts: Experts()",
                field=axis,
                nearest=1,
            )
        if tp.size > 1:
            check_pairs(model, styles, self.regions)
            check_ties(model, styles, set(self.cut))
        self._rest()
        self.done.regions = list(self.regions)

    # What is where.

    def moe_of(self, path: str) -> str | None:
        """The mixture of experts that a module is, or lies in."""
        return next((p for p in self.below if lies_in(path, p)), None)

    def tokens_at(self, path: str) -> TokenCut | None:
        """How tokens are cut where this module works; None: every rank has all."""
        moe = self.moe_of(path)
        return self.below[moe] if moe is not None else self.tokens

    def region_at(self, path: str) -> Region | None:
        """The region that a module lies in: the innermost."""
        around = [p for p in self.regions if lies_in(path, p)]
        return self.regions[max(around, key=len)] if around else None

    # The styles, one after the other.

    def _apply(self) -> None:
        for path, module in self.model.named_modules():
            style = self.styles.get(path)
            if style is not None:
                where = path or type(self.model).__name__
                _HOW[type(style)](self, path, where, module, style)

    def _region(self, path: str, where: str, module: nn.Module, style: s.Region) -> None:
        if self.tp.size == 1:
            return
        self.refuse_inner(path, where)
        region = self.regions[path] = Region(where, self.tp, self.tokens_at(path))
        first = first_of(module)

        def entering(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return with_first(where, first, args, kwargs, region.enter)

        def leaving(module: nn.Module, args: Any, out: Any) -> None:
            region.leave()

        if style.draws:
            _within(module, lambda: own_randomness(self.tp))
        module.register_forward_pre_hook(entering, with_kwargs=True)
        module.register_forward_hook(leaving, always_call=True)

    def _column(self, path: str, where: str, module: nn.Module, style: s.Column) -> None:
        linear = _linear(where, module, "Column")
        if self.tp.size == 1:
            return
        ranges = style.cut.ranges(self._length(linear.weight, 0), self.tp.size, where)
        region, alone = self.region_at(path), False
        if region is None:
            region, alone = Region(where, self.tp, self.tokens_at(path)), True
        self._cut(linear.weight, 0, ranges, where)
        if linear.bias is not None:
            self._cut(linear.bias, 0, ranges, where)
        made = become_column(linear, where, region, alone)
        share_heads(made, ranges, self.rank, self.tp)
        if isinstance(style.cut, Heads) and style.cut.role == "kv":
            self._serve(made, style.cut, self.model.get_submodule(path.rpartition(".")[0]))
        if made.shared and (style.gather or isinstance(style.cut, Parts)):
            what = "gathered" if style.gather else "laid out in a fused weight"
            raise PlanError(
                f"{where}: key and value heads that several of {self.tp.size} ranks hold cannot be {what}",
                "use a divisor of the key and value heads as tp, or separate projections",
                field="mesh",
            )
        if style.gather:
            made.gathers = [sum(b - a for a, b in some) for some in ranges]

    def _serve(self, made: Any, cut: Heads, attention: Any) -> None:
        """Where a rank's query heads do not share its key and value heads evenly, every query head gets a copy."""
        each = [cut.served(r, self.tp.size) for r in range(self.tp.size)]
        held = [max(served) + 1 for served in each]
        even = [
            len(served) % n == 0 and served == [i // (len(served) // n) for i in range(len(served))]
            for served, n in zip(each, held)
        ]
        if not all(even):
            made.repeats, made.head_dim = each[self.tp.rank], cut.head_dim
        if hasattr(
            attention, "num_key_value_groups"
        ):  # transformers' repeat key and value heads by the whole model's ratio
            queries, heads = len(each[self.tp.rank]), held[self.tp.rank]
            attention.num_key_value_groups = 1 if made.repeats is not None else queries // heads

    def _row(self, path: str, where: str, module: nn.Module, style: s.Row) -> None:
        linear = _linear(where, module, "Row")
        if self.tp.size == 1:
            return
        ranges = style.cut.ranges(self._length(linear.weight, 1), self.tp.size, where)
        self._cut(linear.weight, 1, ranges, where)
        made = become_row(linear, where, self.tp, self.tokens_at(path), self.region_at(path))
        if style.scatter:
            made.scatters = [sum(b - a for a, b in some) for some in ranges]
        if linear.bias is not None:
            self._whole(linear.bias, "tokens" if made.tokens is not None else "dense")

    def _vocab(self, path: str, where: str, module: nn.Module, style: s.Vocab) -> None:
        if not isinstance(module, nn.Embedding):
            raise _not_a(where, module, "Vocab", "an nn.Embedding")
        if self.tp.size == 1:
            return
        ranges = Even(may_be_empty=True).ranges(self._length(module.weight, 0), self.tp.size, where)
        self._cut(module.weight, 0, ranges, where)
        become_vocab_embedding(module, self.tp, self.tokens if style.scatter else None)

    def _loss(self, path: str, where: str, module: nn.Module, style: s.Loss) -> None:
        if self.tp.size > 1:
            become_vocab_cross_entropy(module, self.tp, style.vocab)

    def _parts(self, path: str, where: str, module: nn.Module, style: s.Tokens | s.Router) -> None:
        tokens, scatter = self.tokens_at(path), getattr(style, "scatter", None)
        partial = self.tp.size > 1 and (tokens is not None or self.region_at(path) is not None)
        for p in module.parameters(recurse=scatter != "input"):
            self._whole(p, "tokens" if partial else "dense")
        if tokens is None:
            return
        first = first_of(module)

        def cutting(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if scatter == "input":
                return with_first(where, first, args, kwargs, lambda x: tokens.scatter(x, where))
            return with_first(where, first, args, kwargs, lambda x: tokens.own(x, -1))

        def joining(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            tokens.settle(out, where)
            return gather_from(out, self.tp, tokens.dim, tokens.sizes, name=where)

        if scatter is not None:
            module.register_forward_pre_hook(cutting, with_kwargs=True, prepend=True)
        if getattr(style, "gather", False):
            module.register_forward_hook(joining)

    def _whole_module(self, path: str, where: str, module: nn.Module, style: s.Whole) -> None:
        for p in module.parameters():
            self._whole(p, "dense")

    def _dropout(self, path: str, where: str, module: nn.Module, style: s.Dropout) -> None:
        if style.own and self.tp.size > 1:
            become_sharded_dropout(module, self.tp)

    def refuse_inner(self, path: str, where: str) -> None:
        """Raises a PlanError where a module lies in a Region, whose parts it would take for the whole."""
        if (around := self.region_at(path)) is not None:
            raise PlanError(
                f"{where} lies in the Region {around.name!r}",
                "regions, and mixtures of experts, do not lie within each other: name the inner ones only",
                field="sharding_map",
            )

    # The rest of the model.

    def _whole(self, p: Tensor, kind: Kind) -> None:
        counted = () if kind == "dense" and self.tp.rank else None
        self.done.held.setdefault(self.names[id(p)], Held(Layout(), kind, counted))

    def _length(self, p: Tensor, dim: int) -> int:
        """Of the whole parameter: a tied one may be cut already."""
        if id(p) not in self.names:
            raise PlanError(
                f"a weight of shape {tuple(p.shape)} is computed from parameters (weight_norm, spectral_norm, ...)",
                "cut plain linear layers, or leave this one whole",
                field="sharding_map",
            )
        return self.done.shapes[self.names[id(p)]][dim]

    def _cut(self, p: Tensor, dim: int, ranges: tuple[Ranges, ...], where: str) -> None:
        """Makes a parameter this rank's piece of it; a tied one is cut once, and must be cut alike by all who use it."""
        name = self.names[id(p)]
        if (before := self.cut.get(id(p))) is not None:
            if before != (dim, ranges):
                raise PlanError(
                    f"{where}: {name!r} is tied, and cut otherwise by another module that uses it",
                    "cut tied modules alike, e.g. an embedding by Vocab() and its head by Column()",
                    field="sharding_map",
                )
            return
        self.cut[id(p)] = dim, ranges
        rank = self.tp.rank
        shared = [(a, b, holders) for a, b, holders in shared_ranges(ranges, rank) if not dim]
        lost = [(a, b) for a, b, holders in shared if holders[0] != rank]
        counted: Ranges | None = None
        if lost:
            length, at, kept = sum(b - a for a, b in ranges[rank]), 0, []
            for a, b in [*lost, (length, length)]:
                if at < a:
                    kept.append((at, a))
                at = b
            counted = tuple(kept)
        overlaps = any(shared_ranges(ranges, r) for r in range(self.tp.size))
        layout = Layout({"tp": Slices(dim, ranges)})
        self.done.held[name] = Held(layout, "dense", counted, overlaps)
        p.data = taken(p.data, ranges[rank], dim)

    def _rest(self) -> None:
        """Modules that the map says nothing of: whole on every rank. Where ranks see different tokens that would be wrong."""
        for path, module in self.model.named_modules():
            region, tokens = self.region_at(path), self.tokens_at(path)
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p and path not in self.styles:
                if region is not None:
                    raise unnamed(
                        f"{path}, a dropout,", region.name, "Dropout(own=True) if it drops parts, own=False if not"
                    )
                if tokens is not None and self.tp.size > 1:
                    become_sharded_dropout(module, self.tp)
            for name, p in module.named_parameters(recurse=False):
                if self.names[id(p)] in self.done.held:
                    continue
                if self.tp.size > 1 and p.requires_grad and (tokens is not None or region is not None):
                    index = 'Tokens(scatter="index") for positions, ' if isinstance(module, nn.Embedding) else ""
                    raise unnamed(
                        f"{path}.{name}" if path else name,
                        region.name if region is not None else "",
                        f"{index}Tokens() if it works on this rank's part, Whole() if on what every rank has whole",
                    )
                self._whole(p, "dense")


_HOW: dict[type, Any] = {
    s.Region: Surgery._region,
    s.Column: Surgery._column,
    s.Row: Surgery._row,
    s.Vocab: Surgery._vocab,
    s.Loss: Surgery._loss,
    s.Tokens: Surgery._parts,
    s.Router: Surgery._parts,
    s.Whole: Surgery._whole_module,
    s.Dropout: Surgery._dropout,
    s.Moe: mixtures.moe,
    s.Experts: mixtures.experts,
    s.Balance: mixtures.balance,
    s.Capacity: mixtures.capacity,
}


def _linear(where: str, module: nn.Module, style: str) -> nn.Linear:
    """The module, if it computes what nn.Linear computes."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise _not_a(where, module, style, "an nn.Linear")
    return module


def _not_a(where: str, module: nn.Module, style: str, what: str) -> PlanError:
    return PlanError(
        f"{where} is a {type(module).__name__}, but {style}() needs {what}",
        "name the linear maps themselves, and plain ones: a model is cut once",
        field="sharding_map",
    )


def _within(module: nn.Module, context: Any) -> None:
    """Makes a module's forward run within a context of its own."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with context():
            return inner(*args, **kwargs)

    module.forward = forward
