"""The decay of a moving average is a function of the updates made, and of nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.config.schema.run import Ema
from unisono.optim import ema
from unisono.runtime.errors import ConfigError


def test_it_is_the_weights_until_it_begins_and_is_then_renewed_every_so_many_updates() -> None:
    config = Ema(decay=0.9, start=3)
    assert [ema.decay(config, made) for made in (1, 2, 3)] == [0.0, 0.0, 0.0]
    assert ema.decay(config, 4) == pytest.approx(0.1)
    config = Ema(decay=0.9, start=2, every=3, warmup=False)
    assert [ema.decay(config, made) for made in range(1, 9)] == [0.0, 0.0, None, None, 0.9, None, None, 0.9]
    assert ema.decay(Ema(decay=0.999, warmup=False), 1) == 0.999, "all of it from the beginning"


@given(st.floats(0, 0.9999), st.integers(0, 50), st.integers(1, 9), st.integers(1, 10**6))
def test_the_decay_rises_to_its_value_and_never_past_it(decay: float, start: int, every: int, updates: int) -> None:
    config = Ema(decay=decay, start=start, every=every)
    now, later = (ema.decay(config, start + every * n) for n in (updates, updates + 1))
    assert now is not None
    assert later is not None
    assert 0 <= now <= later <= decay
    assert now == decay or now == updates / (updates + 9)


@pytest.mark.parametrize("start", [10, 9])
def test_an_average_that_would_never_begin_is_refused(start: int) -> None:
    ema.check(Ema(decay=0.9, start=start), total=start + 1)
    ema.check(Ema(), total=1)
    with pytest.raises(
        ConfigError, match=rf"ema\.start={start} .* after {start + 1} updates, but the run has only {start};"
    ):
        ema.check(Ema(decay=0.9, start=start), total=start)


@pytest.mark.parametrize("key", ["start", "every", "warmup"])
def test_settings_of_an_average_that_is_not_kept_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=rf"ema\.{key} has no effect without ema\.decay"):
        Ema.model_validate({key: {"start": 5, "every": 2, "warmup": False}[key]})
