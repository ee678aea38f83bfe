"""What a run's random numbers begin with, and what those of a resumed one."""

from __future__ import annotations

import numpy as np


def seed_from(seed: int, frames: int) -> int:
    """Return the seed of a run with the setting `seed` that goes on after `frames` frames.

    That is `seed` for one that begins. A resumed one would otherwise go through the first one's initial states, noise
    and minibatches again. The result has 31 bits, so that numbers above it, one per environment, are seeds as well.
    """
    if frames == 0:
        return seed
    return int(np.random.SeedSequence([seed, frames]).generate_state(1)[0] >> 1)
