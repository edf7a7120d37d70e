"""Which weights have a moving average, and its decay: a pure function of the number of updates.

So the average needs no counter: resuming needs only the step, and processes cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from unisono.config.schema.run import Ema
from unisono.runtime.errors import ConfigError, nearest


def decay(config: Ema, made: int) -> float | None:
    """The decay of the average at an update; None if the average is not updated then.

    Until `config.start` it is 0, so the average equals the weights. At the n-th update of the average after that it is
    n / (n + 9), but at most `config.decay`: with the full decay from the beginning, the average would stay near the
    initial weights for about 1 / (1 - decay) updates. (The rule of TensorFlow's `ExponentialMovingAverage`,
    `(1 + m) / (10 + m)` with `m = n - 1`.)

    Args:
        config: the group `ema`, with a decay.
        made: number of updates including this one, from 1.

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


def averaged_names(config: Ema, trained: Sequence[str]) -> list[str]:
    """Which trained parameters are averaged: all that `config.exclude` does not match; none without a decay.

    Raises:
        ConfigError: if a pattern matches none of them.
    """
    for pattern in config.exclude:
        if not any(fnmatchcase(name, pattern) for name in trained):
            raise ConfigError(f"ema.exclude: '{pattern}' matches no parameter, {nearest(pattern, trained)}")
    if config.decay is None:
        return []
    return [name for name in trained if not any(fnmatchcase(name, pattern) for pattern in config.exclude)]


def check(config: Ema, total: int) -> None:
    """Reject an average that would never be updated.

    Raises:
        ConfigError: naming the key and the length of the run.
    """
    if config.decay is not None and config.start + config.every > total:
        raise ConfigError(
            f"ema.start={config.start} and ema.every={config.every}: the average would first be updated after "
            f"{config.start + config.every} updates, but the run has only {total}; lower them"
        )
