"""Placement: which rank holds which stage, and the routes that microbatches take through them.

A route is the rank of every stage as one microbatch meets them. Most schedules have one. The bidirectional ones
(DualPipe, Chimera) have two: microbatches of the first half take route 0, those of the second half route 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastpipe.checks import check_counts, check_index, check_type, is_whole


@dataclass(frozen=True)
class Placement:
    """The rank of every stage, for every route.

    Attributes:
        num_ranks: the number of ranks.
        routes: ``routes[k][stage]`` is the rank that computes ``stage`` for the microbatches of route ``k``.
        name: the name that is printed.
    """

    num_ranks: int
    routes: tuple[tuple[int, ...], ...]
    name: str = "custom"

    def __post_init__(self) -> None:
        (num_ranks,) = check_counts(num_ranks=self.num_ranks)
        check_type(str, name=self.name)
        try:
            routes = tuple(map(tuple, self.routes))
        except TypeError:
            raise TypeError(f"routes = {self.routes!r}: give for each route the rank of every stage") from None
        if not 1 <= len(routes) <= 2:
            raise ValueError(f"routes: a placement has one route or two, found {len(routes)}")
        for route in routes:
            if not route or len(route) != len(routes[0]):
                raise ValueError("routes: every route names a rank for each of the same stages, at least one")
            for stage, rank in enumerate(route):
                if not (is_whole(rank) and rank < num_ranks):
                    raise ValueError(f"stage {stage} is placed on rank {rank!r}; ranks are 0 to {num_ranks - 1}")
        placed = {rank for route in routes for rank in route}
        if len(placed) < num_ranks:
            idle = next(rank for rank in range(num_ranks) if rank not in placed)
            raise ValueError(f"no stage is placed on rank {idle}: give every one of {num_ranks} ranks a stage")
        # lists and numbers of NumPy become what can be hashed, compared and written as JSON
        object.__setattr__(self, "num_ranks", num_ranks)
        object.__setattr__(self, "routes", tuple(tuple(map(int, route)) for route in routes))

    @classmethod
    def loop(cls, num_ranks: int, stages_per_rank: int = 1) -> Placement:
        """Stage s on rank s mod p."""
        num_ranks, num_stages = _check_stages(num_ranks, stages_per_rank)
        ranks = tuple(s % num_ranks for s in range(num_stages))
        return cls(num_ranks, (ranks,), "loop")

    @classmethod
    def wave(cls, num_ranks: int, stages_per_rank: int) -> Placement:
        """Zig-zag: down the ranks, up again, and so on; ``stages_per_rank = 2`` is the V."""
        num_ranks, num_stages = _check_stages(num_ranks, stages_per_rank)
        down = list(range(num_ranks))
        ranks = [r for segment in range(num_stages // num_ranks) for r in (down if segment % 2 == 0 else down[::-1])]
        return cls(num_ranks, (tuple(ranks),), "V" if stages_per_rank == 2 else "wave")

    @classmethod
    def v(cls, num_ranks: int) -> Placement:
        """Stages r and 2p-1-r on rank r."""
        return cls.wave(num_ranks, 2)

    @classmethod
    def bidirectional(cls, num_ranks: int) -> Placement:
        """Route 0 runs stage s on rank s, route 1 on rank p-1-s: every rank holds two stages."""
        (num_ranks,) = check_counts(num_ranks=num_ranks)
        forward = tuple(range(num_ranks))
        return cls(num_ranks, (forward, forward[::-1]), "bidirectional")

    @classmethod
    def custom(cls, stage_to_rank: Sequence[int], num_ranks: int | None = None) -> Placement:
        """One route, given as the rank of every stage."""
        if not isinstance(stage_to_rank, Iterable):
            raise ValueError(f"stage_to_rank = {stage_to_rank!r}: give the rank of every stage, as a list")
        given = tuple(stage_to_rank)
        if not given:
            raise ValueError("stage_to_rank is empty: give the rank of every stage")
        for stage, rank in enumerate(given):
            if not is_whole(rank):
                raise ValueError(f"stage_to_rank[{stage}] = {rank!r}: ranks are whole numbers of at least 0")
        ranks = tuple(map(int, given))
        return cls(max(ranks) + 1 if num_ranks is None else num_ranks, (ranks,), "custom")

    @property
    def num_stages(self) -> int:
        """How many stages the model has."""
        return len(self.routes[0])

    @property
    def num_routes(self) -> int:
        """One, or two for a bidirectional placement."""
        return len(self.routes)

    def route_of(self, microbatch: int, num_microbatches: int) -> int:
        """The route that a microbatch takes: with two, the first half takes 0. ValueError for another microbatch."""
        microbatch = check_index("microbatch", microbatch, *check_counts(num_microbatches=num_microbatches))
        return int(self.num_routes == 2 and microbatch >= num_microbatches // 2)

    def rank_of(self, stage: int, route: int = 0) -> int:
        """The rank that computes ``stage`` on ``route``; ValueError for numbers that there are not, -1 too."""
        ranks = self.routes[check_index("route", route, self.num_routes)]
        return ranks[check_index("stage", stage, self.num_stages)]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending, those of every route; ValueError for another rank."""
        rank = check_index("rank", rank, self.num_ranks)
        return tuple(s for s in range(self.num_stages) if any(route[s] == rank for route in self.routes))

    def stages_by_rank(self) -> list[tuple[int, ...]]:
        """``stages_of`` for every rank at once."""
        found: list[set[int]] = [set() for _ in range(self.num_ranks)]
        for route in self.routes:
            for stage, rank in enumerate(route):
                found[rank].add(stage)
        return [tuple(sorted(stages)) for stages in found]


def _check_stages(num_ranks: int, stages_per_rank: int) -> tuple[int, int]:
    """The number of ranks, and of their stages."""
    num_ranks, stages_per_rank = check_counts(num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    (num_stages,) = check_counts(**{"num_ranks * stages_per_rank": num_ranks * stages_per_rank})
    return num_ranks, num_stages
