"""What a condition of the program comes to on a given rank, and which are the same on all: where the source shows it.

Made of a rank's number, of its place in a group and of constants, a condition can be worked out for a rank that is not
there any more. Nothing of the program is run for that.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from emu.spmd.group import Group
from emu.spmd.rank import Rank
from emu.virtual.causes.bindings import Binding, bindings_in, leaves_early
from emu.virtual.causes.taint import LOOPS
from emu.virtual.causes.workings import BUILTINS, PLAIN, Unknown, work_out

MAKES = ("ones", "zeros", "empty", "full", "rand", "randn", "arange", "eye")  # tensors of a shape that is stated
SHAPES = ("numel", "dim", "size", "nelement")  # methods that read a shape


class Scope:
    """The variables of one frame of a rank's program.

    Args:
        function: its syntax tree.
        values: variables of it that hold ranks, groups and plain values, as they are on the rank that stands there.
        given: what its caller gave it, by parameter: an expression of the caller's.
        caller: None for the program itself, whose arguments all ranks share.
        outer: what the function is written in, if that is known: a function that runs, too, or the file.
        module: the tree of its file.
        bare: whether no frame is left, and nothing known but the source.
    """

    def __init__(
        self,
        function: ast.AST,
        values: dict[str, Any],
        given: dict[str, ast.expr] | None = None,
        caller: Scope | None = None,
        outer: Scope | None = None,
        module: ast.AST | None = None,
        bare: bool = False,
    ) -> None:
        self.function, self.values, self.given, self.caller = function, values, given or {}, caller
        self.outer, self.bare = outer, bare
        self.bound = bindings_in(function)
        args = getattr(function, "args", None)
        named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg] if args is not None else []
        self.parameters = {arg.arg for arg in named if arg is not None}
        nodes = list(ast.walk(module)) if module is not None else []
        self._elsewhere = {n for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal)) for n in node.names}
        self._asked: set[str] = set()

    # The value on a rank.

    def value(self, node: ast.expr, rank: int) -> Any:
        """What an expression comes to on a rank.

        Raises:
            Unknown: the source does not show it.
        """
        try:
            return self._value(node, rank)
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise Unknown from error

    def _value(self, node: ast.AST, rank: int) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, PLAIN):
            return node.value
        if isinstance(node, ast.Name):
            return self._named(node.id, rank)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, rank)
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return tuple(self._value(item, rank) for item in node.elts)
        if isinstance(node, ast.UnaryOp):
            return work_out(node.op, self._value(node.operand, rank))
        if isinstance(node, ast.BinOp):
            return work_out(node.op, self._value(node.left, rank), self._value(node.right, rank))
        if isinstance(node, ast.IfExp):
            return self._value(node.body if self._value(node.test, rank) else node.orelse, rank)
        if isinstance(node, ast.BoolOp):
            ends = isinstance(node.op, ast.Or)
            value: Any = None
            for part in node.values:
                value = self._value(part, rank)
                if bool(value) == ends:
                    break
            return value
        if isinstance(node, ast.Compare):
            left = self._value(node.left, rank)
            for op, right_node in zip(node.ops, node.comparators):
                right = self._value(right_node, rank)
                if not work_out(op, left, right):
                    return False
                left = right
            return True
        if isinstance(node, ast.Dict) and None not in node.keys:
            keys = [self._value(key, rank) for key in node.keys if key is not None]
            return dict(zip(keys, (self._value(value, rank) for value in node.values)))
        if isinstance(node, ast.Subscript):
            return self._value(node.value, rank)[self._value(node.slice, rank)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            name = node.func.id
            if name in BUILTINS and self._builtin(name):
                return BUILTINS[name](*(self._value(argument, rank) for argument in node.args))
        raise Unknown

    def _named(self, name: str, rank: int) -> Any:
        bound, found = self.bound.get(name, []), self.values.get(name)
        value = bound[0].value if len(bound) == 1 and bound[0].how == "assign" and not bound[0].around else None
        whose: Scope = self
        if name in self.parameters and self.caller is not None and not bound:
            value, whose = self.given.get(name), self.caller
        if value is not None:
            if isinstance(found, Group) and whose._is_group(value):
                return _Place(found, rank)
            return whose._value(value, rank)
        if bound:
            raise Unknown
        if isinstance(found, Rank) or (self.bare and name == "rank"):  # as most programs call it, if no frame is left
            return rank
        if isinstance(found, Group):
            return _Place(found, rank)
        if self._shared(name):
            return found
        if self.outer is not None and self._foreign(name):
            return self.outer._named(name, rank)
        raise Unknown

    def _is_group(self, node: ast.expr) -> bool:
        """Whether an expression is a group that is described alike on all ranks: rank.group("tp")."""
        if isinstance(node, ast.Name):
            bound = self.bound.get(node.id, [])
            return not bound or (len(bound) == 1 and bound[0].value is not None and self._is_group(bound[0].value))
        called = node.func if isinstance(node, ast.Call) else None
        if not isinstance(node, ast.Call) or not isinstance(called, ast.Attribute) or called.attr != "group":
            return False
        return all(map(self.same, [*node.args, *(keyword.value for keyword in node.keywords)]))

    def _attribute(self, node: ast.Attribute, rank: int) -> Any:
        base = node.value
        found = self.values.get(base.id) if isinstance(base, ast.Name) else None
        whose = self._named(base.id, rank) if isinstance(base, ast.Name) else self._value(base, rank)
        if isinstance(whose, int) and node.attr in ("id", "rank") and not isinstance(found, Group):
            return int(whose)
        if isinstance(whose, _Place) and node.attr in ("rank", "size"):
            return getattr(whose, node.attr)
        raise Unknown

    def _foreign(self, name: str) -> bool:
        """Whether a name is neither this function's nor its file's."""
        return name not in self.bound and name not in self.parameters and name not in self._elsewhere

    def _builtin(self, name: str) -> bool:
        return self._foreign(name) and (self.outer is None or self.outer._builtin(name))

    def _shared(self, name: str) -> bool:
        """Whether a variable is the program's argument, or of a function around it, and cannot be changed."""
        found = self.values.get(name, self)
        if self.caller is not None or name in self.bound or name in self._elsewhere:
            return False
        return isinstance(found, PLAIN) and not isinstance(found, Rank)

    # Whether all ranks have the same.

    def same(self, node: ast.AST) -> bool:
        """Whether the source shows that an expression has one value on all ranks."""
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Name):
            return self._same_name(node.id)
        if isinstance(node, ast.Attribute):
            if node.attr in ("shape", "ndim", "dtype"):
                return self._same_shape(node.value)
            held = self.values.get(node.value.id) if isinstance(node.value, ast.Name) else None
            of_mesh = isinstance(node.value, ast.Attribute) and node.value.attr == "mesh" and node.attr == "size"
            return of_mesh or (isinstance(held, Group) and node.attr == "size")
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in SHAPES:
                return self._same_shape(node.func.value) and all(map(self.same, node.args))
            if not isinstance(node.func, ast.Name) or node.keywords or not self._builtin(node.func.id):
                return False
            check = self._same_shape if node.func.id == "len" else self.same
            return node.func.id in BUILTINS and all(map(check, node.args))
        plain = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Tuple, ast.List, ast.Subscript)
        if isinstance(node, (*plain, ast.Slice)):
            return all(self.same(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        return False

    def counts(self, name: str, loop: ast.AST) -> bool:
        """Whether a variable counts a loop's rounds, from the same number and in the same steps on all ranks."""
        if isinstance(loop, ast.For):
            called = loop.iter if isinstance(loop.iter, ast.Call) else None
            kind = called.func.id if called is not None and isinstance(called.func, ast.Name) else ""
            if called is None or called.keywords or kind not in ("range", "enumerate") or not self._builtin(kind):
                return False
            target = loop.target
            if kind == "enumerate" and isinstance(target, ast.Tuple):
                target = target.elts[0]
            steps = called.args[1:] if kind == "enumerate" else called.args[::2] if len(called.args) > 1 else []
            return isinstance(target, ast.Name) and target.id == name and all(map(self.same, steps))
        bound = self.bound.get(name, [])
        adds = [b for b in bound if b.how == "add"]
        return len(adds) == 1 and all(b.how in ("add", "assign") and b.value and self.same(b.value) for b in bound)

    def _same_name(self, name: str) -> bool:
        bound = self.bound.get(name, [])
        if name in self.parameters and self.caller is not None:
            return not bound and name in self.given and self.caller.same(self.given[name])
        if not bound:
            outer = self.outer if self._foreign(name) else None
            return self._shared(name) or (outer is not None and outer._same_name(name))
        return name not in self.parameters and self._all(f"value {name}", bound, self.same)

    def _same_shape(self, node: ast.AST) -> bool:
        """Whether a tensor, or what has a length, is equally long on all ranks."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            made = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch" and node.func.attr in MAKES
            return made and all(map(self.same, node.args))
        if isinstance(node, (ast.Tuple, ast.List)):
            return not any(isinstance(item, ast.Starred) for item in node.elts)
        if isinstance(node, ast.Name):
            name, bound = node.id, self.bound.get(node.id, [])
            if name in self.parameters:
                given = self.given.get(name)
                return not bound and self.caller is not None and given is not None and self.caller._same_shape(given)
            if not bound and self.outer is not None and self._foreign(name):
                return self.outer._same_shape(node)
            return bool(bound) and self._all(f"shape {name}", bound, self._same_shape)
        return self.same(node)

    def _all(self, asked: str, bound: list[Binding], check: Callable[[ast.AST], bool]) -> bool:
        """Whether all bindings of a name come to pass on all ranks alike, and give it the same."""
        if asked in self._asked:
            return True  # i = i + 1
        self._asked.add(asked)
        try:
            return all(
                b.value is not None
                and b.how != "other"
                and (self.same if b.how != "assign" else check)(b.value)
                and all(map(self._comes_alike, b.around))
                for b in bound
            )
        finally:
            self._asked.discard(asked)

    def _comes_alike(self, node: ast.AST) -> bool:
        if isinstance(node, (ast.For, ast.While)) and leaves_early(node):
            return False
        decides = node.iter if isinstance(node, ast.For) else getattr(node, "test", None)
        return isinstance(node, (*LOOPS, ast.If, ast.IfExp)) and decides is not None and self.same(decides)


class _Place:
    """A rank's place in a group."""

    def __init__(self, group: Group, rank: int) -> None:
        if rank not in group.members:
            raise Unknown
        self.rank, self.size = group.members.index(rank), group.size
