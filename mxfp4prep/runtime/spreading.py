"""Expert parallelism: which whole experts a rank holds, and which rows it adds the shared one to.

With `--ep`, audit and convert take the tensor-parallel ranks to be the expert-parallel ones: at
degree 8 each holds an eighth of every attention matrix and an eighth of the experts. There may be
more expert-parallel ranks than tensor-parallel ones, as where attention is data-parallel: then
ranks are numbered group by group, each group having `tp_size` of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mxfp4prep.errors import Unsupported, UsageError


@dataclass(frozen=True, slots=True)
class Spread:
    """One rank among those that experts are spread over; a `size` of 1 spreads nothing."""

    rank: int = 0
    size: int = 1

    @classmethod
    def make(cls, rank: int, size: int, tp_rank: int, tp_size: int) -> Spread:
        """The rank, one of `Ranks`; raises UsageError for one that contradicts tp_rank."""
        if size > 1 and (size % tp_size or rank % tp_size != tp_rank):
            raise UsageError(
                "load",
                "the ranks of expert and tensor parallelism do not go together",
                found=f"ep_rank {rank} of {size}, tp_rank {tp_rank} of {tp_size}",
                expected="ep_size a multiple of tp_size, and ep_rank % tp_size == tp_rank",
                hint="without other parallelism, ep_rank is tp_rank and ep_size is tp_size",
            )
        return cls(rank, size)

    def block(self, experts: int, where: str) -> range:
        """The experts of this rank: a contiguous block; the first ranks have one more where the
        number does not divide. So engines place them by default.

        Raises Unsupported where ranks would go without.
        Source: vLLM 0.33.0, determine_expert_map with linear placement.
        """
        if experts < self.size:
            raise Unsupported(
                where,
                "not enough experts for every rank",
                found=f"{experts} experts, ep_size {self.size}",
                hint="load with an ep_size of at most that many",
            )
        each, more = divmod(experts, self.size)
        start = self.rank * each + min(self.rank, more)
        return range(start, start + each + (self.rank < more))

    def expert_map(self, experts: int, where: str) -> torch.Tensor | None:
        """(experts,) int32, each expert's place in this rank's banks or -1; None for size 1."""
        if self.size == 1:
            return None
        block = self.block(experts, where)
        places = torch.full((experts,), -1, dtype=torch.int32)
        places[block.start : block.stop] = torch.arange(len(block), dtype=torch.int32)
        return places

    def turn(self, ranks: int) -> Turn:
        """Whose turn it is where each result is held together by `ranks` neighbouring ranks."""
        return Turn(self.rank // ranks, self.size // ranks)


@dataclass(frozen=True, slots=True)
class Turn:
    """What several ranks hold alike, each does for its share of the rows: row % of == mine."""

    mine: int = 0
    of: int = 1


ALONE = Spread()
EVERY_ROW = Turn()
