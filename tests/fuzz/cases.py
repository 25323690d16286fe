"""How many cases: a few hundred in the ordinary tests, always the same ones; `make fuzz` draws 10 000 fresh ones."""

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings

TOTAL = int(os.environ.get("APHQ_FUZZ_CASES", "0"))
ORDINARY = 300


def cases(share: float) -> Callable[[Any], Any]:
    """Decorator: this test's share of all cases."""
    phases = [Phase.explicit, Phase.generate]
    if TOTAL:  # shrinking costs as much as hundreds of cases: worth it where somebody will look at the result
        phases.append(Phase.shrink)
    return settings(
        max_examples=max(1, round(share * (TOTAL or ORDINARY))),
        deadline=None,  # each case has a limit of its own
        derandomize=not TOTAL,
        database=None,
        phases=phases,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
