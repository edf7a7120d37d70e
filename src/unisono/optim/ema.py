"""The decay of a moving average of the weights: a pure function of the updates made.

So an average needs no counter of its own: a resume needs nothing but the step, and no process can count otherwise.
"""

from __future__ import annotations

from unisono.config.schema.run import Ema
from unisono.runtime.errors import ConfigError


def decay(config: Ema, made: int) -> float | None:
    """What the average keeps of itself after an update; None where it is left as it is.

    Until `config.start` it keeps nothing, and is the weights. The n-th renewal after that keeps n / (n + 9), and never
    more than `config.decay`: an average that kept all of it from the beginning would stay near the initial weights for
    about 1 / (1 - decay) updates. (The rule of TensorFlow's `ExponentialMovingAverage`, `(1 + m) / (10 + m)` with
    `m = n - 1` renewals before.)

    Args:
        config: the group `ema`, with a decay.
        made: updates, this one among them, from 1.

    >>> [round(decay(Ema(decay=0.2, start=1), made), 3) for made in range(1, 5)]
    [0.0, 0.1, 0.182, 0.2]
    """
    assert config.decay is not None
    if made <= config.start:
        return 0.0
    renewals, rest = divmod(made - config.start, config.every)
    if rest:
        return None
    return min(config.decay, renewals / (renewals + 9)) if config.warmup else config.decay


def check(config: Ema, total: int) -> None:
    """Refuse an average that would never begin.

    Raises:
        ConfigError: naming the key and the length of the run.
    """
    if config.decay is not None and config.start + config.every > total:
        raise ConfigError(
            f"ema.start={config.start} and ema.every={config.every}: the average would be renewed for the first time "
            f"after {config.start + config.every} updates, but the run has {total}; lower them"
        )
