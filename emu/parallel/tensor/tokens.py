"""How the sequence is cut over the ranks of a tensor-parallel group: sequence parallelism's bookkeeping."""

from __future__ import annotations

from torch import Tensor

from emu.spmd import EmuError, Group, scatter_to, split_sizes


class TokenCut:
    """The cut of the sequence in the forward under way.

    Attributes:
        group: over whose ranks it is cut, as evenly as can be.
        dim: of activations [batch, seq, width] along which tokens lie.
        length: tokens of the whole sequence; set by whoever cuts it. A rank along cp may have none of a short one.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.dim = group, 1
        self._length: int | None = None  # until somebody cuts a sequence, which may have no token
        self._seen: dict[int, int] = {}  # tokens of this rank -> of the whole, the last time

    @property
    def length(self) -> int:
        return self._length or 0

    @length.setter
    def length(self, tokens: int) -> None:
        self._length = tokens

    @property
    def sizes(self) -> list[int]:
        """Tokens of every rank, in group order."""
        return split_sizes(self.length, self.group.size)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of something whole that needs no gradient, such as positions."""
        self.length = x.shape[dim]
        sizes, at = self.sizes, self.group.rank
        return x.narrow(dim, sum(sizes[:at]), sizes[at])

    def scatter(self, x: Tensor, name: str) -> Tensor:
        """This rank's tokens of x [batch, seq, ...]. Backward: an all-gather."""
        self.length = x.shape[self.dim]
        return scatter_to(x, self.group, self.dim, self.sizes, name=name)

    def settle(self, x: Tensor, where: str) -> None:
        """These are this rank's tokens. A recomputation may be of another forward than the last one, with another length.

        Raises:
            EmuError: activations that are not this rank's tokens.
        """
        mine = self.sizes[self.group.rank]
        given = x.shape[self.dim] if x.dim() > self.dim else -1
        if given == mine and self._length is not None:
            self._seen[mine] = self.length
        elif given in self._seen:
            self.length = self._seen[given]
        else:
            raise EmuError(
                f"{where}: under sp rank {self.group.rank} of {self.group.label!r} has {mine} of {self.length} tokens, but was "
                f"given {tuple(x.shape)}",
                "cut the sequence first: Vocab() at the embedding, or Tokens(scatter='input') at the first module that works on "
                "tokens alone; activations are [batch, seq, width]",
            )
