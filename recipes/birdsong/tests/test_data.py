"""Made-up songs, views and masks: what is drawn has an address, and counts are exact."""

from __future__ import annotations

import numpy as np
import pytest

from recipes.birdsong.tests.small import shown, task
from unisono import ConfigError, DataError, SampleContext, generator
from unisono_birdsong.data.augment import augment_clip, mask_order, views
from unisono_birdsong.data.synthetic import Songs
from unisono_birdsong.settings import Augment, SyntheticData


def songs(part: str = "training", **changes: object) -> Songs:
    config = {"kind": "synthetic", "species": 4, "recordings": 48, "held_out": 16, "seconds": 1.5, "rate": 8000}
    return Songs(SyntheticData.model_validate({**config, **changes}), part)


def test_a_song_is_a_function_of_its_row() -> None:
    one, again = songs(), songs()
    audio, rate = one[7]["audio"]
    assert audio.shape == (12_000,) and audio.dtype == np.float32 and rate == 8000
    _ = again[3]
    np.testing.assert_array_equal(audio, again[7]["audio"][0])
    assert not np.array_equal(audio, one[6]["audio"][0])  # the same bird, another recording
    assert one[6]["group"] == one[7]["group"] != one[8]["group"]
    assert one.fingerprint == again.fingerprint != songs(seed=1).fingerprint
    with pytest.raises(IndexError):
        one[48]


def test_no_bird_is_in_both_parts() -> None:
    training, held_out = songs(), songs("held out")
    groups = [{source[row]["group"] for row in range(len(source))} for source in (training, held_out)]
    assert groups[0].isdisjoint(groups[1])
    assert not np.array_equal(training[0]["audio"][0], held_out[0]["audio"][0])
    assert training.classes == held_out.classes


def test_species_sound_different() -> None:
    """The nearest mean spectrum of the training names most held-out songs."""

    def spectra(source: Songs) -> tuple[np.ndarray, np.ndarray]:
        rows = [source[row] for row in range(len(source))]
        power = [np.log(np.abs(np.fft.rfft(row["audio"][0]))[:6000].reshape(60, 100).mean(1) + 1e-3) for row in rows]
        return np.stack(power), np.array([row["labels"][0] for row in rows])

    known, labels = spectra(songs())
    assert set(labels.tolist()) == {0, 1, 2, 3}
    means = np.stack([known[labels == label].mean(0) for label in range(4)])
    asked, truth = spectra(songs("held out"))
    found = np.square(asked[:, None] - means).sum(-1).argmin(1)
    assert (found == truth).mean() > 0.7


def test_a_recording_may_have_several_species() -> None:
    source = songs(most=3)
    counts = {len(source[row]["labels"]) for row in range(0, 48, 4)}
    assert counts == {1, 2, 3}
    with pytest.raises(ValueError, match=r"data\.most=5 species in a recording, but data\.species=4"):
        songs(most=5)


@pytest.mark.parametrize(("grid", "masked"), [((32, 8), 192), ((4, 2), 6), ((5, 3), 11), ((7, 5), 3)])
def test_exactly_so_many_patches_are_hidden_in_blocks_first(grid: tuple[int, int], masked: int) -> None:
    count = grid[0] * grid[1]
    order = mask_order(grid, masked, generator("mask", 1))
    assert order.dtype == np.int32 and sorted(order.tolist()) == list(range(count))
    hidden = np.isin(np.arange(count), order[count - masked :]).reshape(grid)
    assert hidden.sum() == masked
    whole = sum(hidden[r : r + 2, c : c + 2].all() for r in range(0, grid[0], 2) for c in range(0, grid[1], 2))
    assert whole >= masked // 4  # blocks at the edge of an odd grid are whole as well, of fewer patches
    assert not np.array_equal(order, mask_order(grid, masked, generator("mask", 2)))


def test_views_are_stretches_of_their_clip() -> None:
    clip = np.arange(60 * 4, dtype=np.float32).reshape(60, 4)
    made = views(clip, generator("views"), 5, 16, None)
    assert made.shape == (5, 16, 4)
    for view in made:
        first = int(view[0, 0]) // 4
        np.testing.assert_array_equal(view, clip[first : first + 16])
    assert len({view[0, 0] for view in made}) > 2


def test_augmentation_can_be_switched_off() -> None:
    clip = generator("clip").standard_normal((40, 16)).astype(np.float32)
    off = Augment(frequency_masks=0, time_masks=0, noise=0, gain=0)
    np.testing.assert_array_equal(augment_clip(clip, generator("a"), off), clip)
    masked = augment_clip(clip, generator("a"), Augment(noise=0, gain=0, frequency_width=0.5, time_width=0.5))
    assert 0 < (masked != clip).mean() < 1
    assert masked.dtype == augment_clip(clip, generator("a"), Augment()).dtype == np.float32


@pytest.mark.parametrize("objective", ["supervised", "lejepa", "pixio"])
def test_a_row_does_not_depend_on_those_beside_it(objective: str) -> None:
    one = task(objective)
    together, apart = shown(one, range(4)), shown(one, range(2, 4))
    for name, values in apart.items():
        np.testing.assert_array_equal(values, together[name][2:], err_msg=name)
    assert one.counts(together) == {
        **{"supervised": {"classes": 4}, "lejepa": {"invariance": 4, "sigreg": 4}, "pixio": {"reconstruction": 4}}[
            objective
        ],
        "probe": 4,
    }
    shape = (4, 3, 16, 16) if objective == "lejepa" else (4, 32, 16)
    assert together["views" if objective == "lejepa" else "clip"].shape == shape
    held_out = shown(one, range(3), training=False)
    assert held_out["clip"].shape == (3, 32, 16)


def test_supervision_draws_nothing_for_held_out_rows() -> None:
    one, rng = task(), generator("held out")
    before = repr(rng.bit_generator.state)
    one.sample(one.held_out()[0], SampleContext(rng, training=False))
    assert repr(rng.bit_generator.state) == before and not one.draws_in_evaluation


def test_several_labels_need_the_loss_for_them() -> None:
    record = {"audio": b"", "labels": (0, 2), "name": "x.wav"}
    context = SampleContext(generator("x"), True)
    with pytest.raises(DataError, match=r"x\.wav has 2 labels.*task\.loss=asymmetric"):
        task().sample(record, context)
    several = task(loss="asymmetric")
    assert several.sample(record, context)["labels"] == (0, 2)
    with pytest.raises(DataError, match="there are 3 classes"):
        several.sample({**record, "labels": (3,)}, context)
    none = several.collate([{**several.sample(task().data()[0], context), "labels": (), "known": False}])
    assert none["known"].tolist() == [0] and several.counts(none) == {"classes": 0.0, "probe": 0.0}


def test_settings_that_do_not_fit_are_refused() -> None:
    for changes, message in (
        ({"frames": 40, "patch": (16, 8)}, r"model\.frames=40 cannot be cut into patches of 16"),
        ({"frames": 24}, r"makes 30 frames of 0\.5 s, and model\.frames=24"),
        ({"heads": 3}, r"model\.width=16 cannot be shared out among model\.heads=3"),
        ({"heads": 8}, "2 features, and model.positions=rope needs a multiple of 4"),
    ):
        with pytest.raises(ValueError, match=message):
            task(model=changes)
    with pytest.raises(ConfigError, match="less than a patch of 8"):
        task("lejepa", lejepa={"length": 0.1}).check()
    task("lejepa").check()
