"""Mixed precision as an integer program: bits for every side of every site, at the least cost within two budgets.

With x[s, b] = 1 where side s gets b bits: minimise the sum of cost[s, b] x[s, b], subject to one choice for each side
and, for weights and for activations, to a mean of bits per number of at most the target. The costs are what a side does
to the prediction alone; that they add up is an assumption, and a good one while each is small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from aphq.errors import RecipeError

Side = tuple[str, str]  # (site, "weights" or "activations")
Choice = tuple[str, str, int]  # with bits


def allocate(costs: Mapping[Choice, float], counts: Mapping[Side, int], target: float) -> dict[Side, int]:
    """The bits of every side that has costs; RecipeError if the target cannot be met."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    choices = list(costs)
    chosen_sides = list(dict.fromkeys((name, side) for name, side, _ in choices))
    one_each = np.array([[(n, s) == side for n, s, _ in choices] for side in chosen_sides], dtype=float)
    constraints = [LinearConstraint(one_each, 1, 1)]
    for kind in ("weights", "activations"):
        share = [counts[n, s] * bits if s == kind else 0 for n, s, bits in choices]
        total = sum(counts[side] for side in chosen_sides if side[1] == kind)
        if total:
            constraints.append(LinearConstraint(np.array(share, dtype=float) / total, -np.inf, target + 1e-9))
    values = np.array([costs[choice] for choice in choices])
    found = milp(
        values / max(values.max(), 1e-30),
        constraints=constraints,
        integrality=np.ones(len(choices)),
        bounds=Bounds(0, 1),
    )
    if found.x is None:
        least = min(bits for _, _, bits in choices)
        raise RecipeError(f"no bits of at least {least} have a mean of {target:g}: choose a larger target")
    return {(n, s): bits for (n, s, bits), on in zip(choices, found.x, strict=True) if on > 0.5}


def mean_bits(chosen: Mapping[Side, int], counts: Mapping[Side, int], kind: str) -> float:
    """Bits per number, of "weights" or "activations"."""
    sides = [side for side in chosen if side[1] == kind]
    return sum(chosen[side] * counts[side] for side in sides) / max(1, sum(counts[side] for side in sides))


def extrapolated(measured: Mapping[int, float], wanted: Sequence[int]) -> dict[int, float]:
    """Costs at further bits: a bit more quarters the power of the noise, and the divergence with it."""
    highest = max(measured)
    beyond = {bits: measured[highest] / 4 ** (bits - highest) for bits in wanted if bits > highest}
    return {**measured, **beyond}
