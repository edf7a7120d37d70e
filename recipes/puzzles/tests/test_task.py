"""The torch task on its engine: layouts, resume, evaluation, and rows that work at one puzzle for several steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packages.unisono.tests import processes
from packages.unisono.tests.runs import Trace, assert_same, configuration, trace
from recipes.puzzles.tests.puzzles_for_tests import small_sudokus, write_arc, write_csv, write_mazes
from unisono import DataError, prepare
from unisono.data.loading.batch_builder import BatchBuilder
from unisono.data.loading.micro_batch import Request
from unisono.data.order.plan import SampleIndices
from unisono.data.order.planning import checkable_sources
from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess
from unisono.task import Context, SampleContext
from unisono_puzzles import settings
from unisono_puzzles.batches import fields_of, with_kind
from unisono_puzzles.model import act
from unisono_puzzles.task import Puzzles

TOLERANCE = 1e-12
NORMS = 1e-11  # rounding grows from update to update; before the eighth one, the norm differed by 1.3e-12
MODEL = {"width": 16, "heads": 2, "prefix": 2, "embedding": 16, "inner_multiple": 8, "h_cycles": 2, "l_cycles": 2}
DATA = {"kind": "embedded", "side": 4, "clues": (6, 8), "puzzles": 40, "held_out": 10}
SIGN = [{"match": "kinds.*.puzzles.weight", "rule": "sign_sgd", "weight_decay": 1.0, "lr_scale": 0.1}]


def task(model: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **config: Any) -> Puzzles:
    from pydantic import TypeAdapter

    asked = {"halt_steps": 3, "halt_exploration": 0.5, **config}
    made = Puzzles(
        settings.PuzzlesConfig.model_validate(asked),
        model=settings.Model.model_validate({**MODEL, "mixer": "mlp", "positions": "none", **(model or {})}),
        data=TypeAdapter(settings.PuzzlesData).validate_python(data or DATA),
    )
    made.setup()
    return made


SEVERAL = {
    "kind": "several",
    "parts": {"small": DATA, "larger": {**DATA, "side": 6, "clues": (20, 24), "held_out": 7}},
    "mixture": {"weights": {"small": 3, "larger": 1}, "grouped": True},
}


def test_settings_of_a_run_from_before_refill_was_removed_are_read() -> None:
    assert settings.PuzzlesConfig.model_validate({"refill": False}) == settings.PuzzlesConfig()


def run_config(mixture: Any = None, **layout: Any) -> Any:
    return configuration(
        layout=layout,
        data={"mixture": mixture},
        train={"steps": 8, "global_batch": 12, "precision": "fp64", "clip_norm": None},
        optim={"kind": "adam_atan2", "lr": 3e-3, "groups": SIGN, "decay_all": True, "weight_decay": 0.1},
        ema={"decay": 0.9, "exclude": ["kinds.*.puzzles.weight"]},
        schedules={
            "h_cycles": {"kind": "constant", "peak": 2, "start": 0.5, "warmup": 4},
            "halt_exploration": {"kind": "linear", "peak": 0.9, "floor": 0.2},
        },
    )


def quick_to_halt(made: Puzzles) -> Puzzles:
    """The task with a head that halts about half of the rows from the beginning."""
    build = made.build

    def changed() -> Any:
        model = build()
        torch.nn.init.zeros_(model.q_head.bias)
        torch.nn.init.normal_(model.q_head.weight, std=0.3)
        return model

    made.build = changed  # type: ignore[method-assign]
    return made


def traces_of(place: ProcessInfo, group: Any, layouts: list[dict[str, Any]], several: bool = False) -> list[Trace]:
    made = quick_to_halt(task(data=SEVERAL if several else None, weights={"q_continue": 0.5, "consistency": 0.1}))
    return [trace(place, group, made, run_config(made.data_config.mixture, **layout)) for layout in layouts]


def test_every_layout_computes_what_one_process_computes() -> None:
    alone = [{"micro_batch": 12}, {"micro_batch": 3}, {"micro_batch": 12, "activation_checkpointing": 1}]
    together = [{"strategy": "ddp", "world_size": 2, "micro_batch": 3}, {"strategy": "fsdp", "world_size": 2}]
    reference, *others = traces_of(ProcessInfo(), SingleProcess(), alone)
    assert len(set(reference.losses)) == 8 and all(norm > 1e-3 for norm in reference.norms)
    assert 0 < reference.metrics[3]["examples_learnt"] < 4  # some rows have halted, and some have not
    assert all(np.any(gradient) for gradient in reference.gradients.values())
    for other in [*others, *processes.run(traces_of, 2, together)[1]]:
        assert_same(other, reference, TOLERANCE, NORMS)


def test_several_kinds_are_the_same_run_on_every_layout_and_no_micro_batch_has_two() -> None:
    """Kinds of other sizes, whose held-out puzzles no micro-batch divides."""
    reference, other = traces_of(ProcessInfo(), SingleProcess(), [{"micro_batch": 3}, {"micro_batch": 1}], True)
    assert len(set(reference.losses)) == 8 and all(norm > 1e-3 for norm in reference.norms)
    assert all(np.any(gradient) for gradient in reference.gradients.values())  # of the parts of both kinds
    learnt = [reference.metrics[-1][f"{kind}/examples_learnt"] for kind in ("small", "larger")]
    assert min(learnt) > 1  # examples per row, and rows keep their kind
    assert all(sum(row < 40 for row in rows) == 3 for rows in reference.rows)  # of 12, by the weights
    assert {"small/exact", "larger/exact"} <= reference.evaluation.keys()
    together = [
        {"strategy": "ddp", "world_size": 2, "micro_batch": 3},
        {"strategy": "fsdp", "world_size": 2, "micro_batch": 3},
    ]
    for one in [other, *processes.run(traces_of, 2, together, True)[1]]:
        assert_same(one, reference, TOLERANCE, NORMS)


def test_a_row_at_work_ignores_the_new_puzzle_and_one_that_halted_takes_it() -> None:
    made = task(halt_steps=2, halt_exploration=0.0)
    rng = np.random.default_rng(0)
    model = made.build()
    model.q_head.bias.data.fill_(-9.0)  # halts at its last step alone
    rows = [made.sample(made.data()[row], SampleContext(rng, training=True)) for row in range(12)]
    carry, seen = None, []
    for first in (0, 4, 8):
        batch = {name: torch.as_tensor(array) for name, array in made.collate(rows[first : first + 4]).items()}
        context = Context(first // 4, training=True, carry=carry or made.initial_carry(batch))
        loss = made.loss(made.outputs(model, batch, context), batch, context)
        assert loss.carry is not None
        carry = loss.carry
        kept = fields_of(carry, "sudoku")
        seen.append(
            (kept["question"].numpy(), kept["halted"].tolist(), kept["learnt"].tolist(), kept["steps"].tolist())
        )
    first, second, third = seen
    assert (first[0] == second[0]).all() and (second[0] != third[0]).any(axis=1).all()
    assert (third[0] == np.stack([row["question"] for row in rows[8:]])).all()
    assert [one[1] for one in seen] == [[False] * 4, [True] * 4, [False] * 4]
    assert [one[2] for one in seen] == [[0] * 4, [1] * 4, [1] * 4] and [one[3][0] for one in seen] == [1, 2, 1]


def test_held_out_puzzles_are_shown_as_they_are() -> None:
    made = task()
    held_out = made.held_out()
    assert held_out is not None
    kind, puzzle = held_out[3]
    shown = [made.sample((kind, puzzle), SampleContext(np.random.default_rng(n), training=False)) for n in range(3)]
    assert all((one["question"] == puzzle.question).all() and "explore" not in one for one in shown)
    drawn = made.sample((kind, puzzle), SampleContext(np.random.default_rng(0), training=True))
    assert (drawn["question"] != puzzle.question).any()


def test_an_evaluation_makes_all_steps_and_notes_where_each_row_would_have_halted() -> None:
    made = quick_to_halt(task(halt_steps=4))
    model = made.build()
    model.q_head.weight.data.mul_(30)
    rows = [made.sample(made.held_out()[row], SampleContext(np.random.default_rng(0), False)) for row in range(10)]
    batch = {name: torch.as_tensor(array) for name, array in made.collate(rows).items()}
    context = Context(0, training=False)
    with torch.no_grad():
        made_outputs = made.outputs(model, batch, context)
        kind = "sudoku"
        outputs, fields = fields_of(made_outputs, kind), fields_of(batch, kind)
        answers, state = [], None
        for _ in range(4):  # by hand
            carry = fields_of(made.initial_carry(batch), kind) if state is None else state
            rows_ = act.begin(carry, fields, model.starts) if state is None else carry
            step = model(kind, rows_, 2, 2)
            state = {**rows_, **step.states}
            answers.append((step.logits.argmax(-1), step.q[:, 0] > 0))
    assert (outputs["logits"].argmax(-1) == answers[-1][0]).all()
    halts = [next((n for n, (_, wants) in enumerate(answers) if wants[row]), 3) for row in range(10)]
    assert len(set(halts)) > 1
    assert outputs["early_steps"].tolist() == [halt + 1 for halt in halts]
    for row, halt in enumerate(halts):
        assert (outputs["early"][row] == answers[halt][0][row]).all()
    metrics = made.loss(made_outputs, batch, context).metrics
    assert metrics["halting/steps"][0] == sum(halts) + 10 and metrics["exact"][1] == 10


def test_a_prepared_shard_that_changes_under_a_run_is_named(tmp_path: Path) -> None:
    for part, (preparation, _) in task(data={**DATA, "augmentations": 2}).preparation().items():
        prepare.prepare(preparation, tmp_path / part)
    made = task(data={"kind": "prepared", "path": tmp_path})
    for rows, part in ((made.data(), "train"), (made.held_out(), "test")):
        (source,) = checkable_sources(rows)
        source.check_files()
        (shard,) = (tmp_path / part).glob("*.arrow")
        with shard.open("ab") as file:
            file.write(b"x")
        with pytest.raises(DataError, match=f"{shard} has changed since it was opened"):
            source.check_files()


def test_votes_over_augmentations_find_the_answer_that_most_of_them_give(tmp_path: Path) -> None:
    write_arc(tmp_path)
    data = {"kind": "arc", "path": tmp_path, "augmentations": 5}
    made = task({"mixer": "attention"}, data, votes=5)
    made.check()
    held_out = made.held_out()
    fields = made.sample(held_out[0], SampleContext(np.random.default_rng(0), False))
    library, puzzle = made.libraries["arc"], held_out[0][1]
    right = torch.as_tensor(np.stack([library.variant(puzzle, n).answer for n in range(5)]))
    answers = right.clone()
    answers[1:3] = torch.as_tensor(np.stack([library.variant(puzzle, n).question for n in (1, 2)]))
    batch = {name: torch.as_tensor(np.asarray(value))[None] for name, value in fields.items() if name != "kind"}
    for wrong, won in (([], [True, True]), ([1, 2], [True, True]), ([0, 1, 2], [False, True])):
        answers = right.clone()
        for number in wrong:
            answers[number] = torch.as_tensor(library.variant(puzzle, number).question)
        found = made.count_votes(answers, torch.zeros(5), batch)
        assert [bool(found[f"pass@{most}"]) for most in (1, 2)] == won, wrong
    model = made.build()
    outputs = fields_of(made.outputs(model, with_kind("arc", batch), Context(0, training=False)), "arc")
    assert outputs["logits"].shape == (1, 900, 12) and outputs["pass@1"].shape == (1,)


def test_a_run_finds_the_embedding_of_an_arc_task_by_its_name_and_refuses_others(tmp_path: Path) -> None:
    """Numbers of tasks follow from the folder, and a folder of one task numbers it 0."""
    write_arc(tmp_path / "all")
    data = {"kind": "arc", "path": tmp_path / "all", "augmentations": 2, "cache": tmp_path}
    trained = task({"mixer": "attention"}, data)
    trained.save_assets(tmp_path)
    names = trained.libraries["arc"].tasks
    assert names == ("evaluation/task0", "training/task1", "training/task2")
    (tmp_path / "some" / "asked").mkdir(parents=True)
    one = tmp_path / "some" / "asked" / "task2.json"
    one.write_text((tmp_path / "all" / "training" / "task2.json").read_text())

    def opened(**changes: Any) -> Puzzles:
        made = Puzzles(
            trained.config, model=trained.model_config,
            data=settings.ArcData.model_validate({**data, "path": tmp_path / "some", **changes}),
        )  # fmt: skip
        made.load_assets(tmp_path)
        made.setup()
        return made

    library = opened().libraries["arc"]
    (puzzle,) = (library.held_out[row] for row in range(len(library.held_out or ())))
    mine = next(p for p in map(trained.libraries["arc"].training.__getitem__, range(8)) if names[p.group] == names[2])
    for number in range(3):
        assert library.identifier(puzzle, number) == trained.libraries["arc"].identifier(mine, number)
        ours, theirs = (one.arc_variant(2, number) for one in (library, trained.libraries["arc"]))
        assert ours.symmetry == theirs.symmetry and (ours.colours == theirs.colours).all()
    with pytest.raises(ValueError, match=r"data.augmentations=1 does not fit the 10 puzzle embeddings"):
        opened(augmentations=1)
    one.rename(one.with_name("task9.json"))
    with pytest.raises(ValueError, match=r"not trained on the demonstrations of 'asked/task9'"):
        opened()


def test_levels_of_ratings_sort_in_the_order_of_the_ratings(tmp_path: Path) -> None:
    puzzles = small_sudokus(40)
    write_csv(tmp_path / "test.csv", replace(puzzles, ratings=np.arange(40, dtype=np.float32) * 30))
    write_csv(tmp_path / "train.csv", puzzles)
    levels = task(data={"kind": "sudoku", "path": tmp_path, "cache": tmp_path}).catalogue.levels["sudoku"]
    assert levels == sorted(levels) == ["1_up_to_270", "2_up_to_570", "3_up_to_870", "4_above_870"]
    unrated = task(data={"kind": "sudoku", "path": tmp_path / "train.csv", "cache": tmp_path / "other"})
    assert unrated.catalogue.levels["sudoku"] == []


def test_a_micro_batch_of_several_kinds_is_refused(tmp_path: Path) -> None:
    write_mazes(tmp_path / "train.csv")
    parts = {"small": DATA, "maze": {"kind": "maze", "path": tmp_path / "train.csv", "held_out": 0.5}}
    made = task({"mixer": "attention"}, {"kind": "several", "parts": parts})
    assert made.data_config.mixture.grouped and made.data_config.mixture.weights == {"small": 1, "maze": 1}
    sources = made.data()
    context = SampleContext(np.random.default_rng(0), training=True)
    mixed = [made.sample(sources[name][0], context) for name in ("small", "maze")]
    with pytest.raises(ValueError, match=r"several kinds \(maze, small\).*small: 1, maze: 1}, grouped: true"):
        made.collate(mixed)


@pytest.mark.parametrize(("augment", "augmentations"), [(True, None), (True, 3), (False, None)])
@pytest.mark.parametrize("maze", [False, True])
def test_a_whole_micro_batch_is_built_of_the_same_bits_as_its_rows_one_by_one(
    tmp_path: Path, augment: bool, augmentations: int | None, maze: bool
) -> None:
    """For each kind of data that `sample_batch` builds itself, in training and in evaluation, ledger checksums too."""
    data: Any = {"kind": "embedded", "side": 4, "puzzles": 30, "held_out": 6, "clues": (6, 8)}
    if maze:
        write_mazes(tmp_path / "train.csv")
        data = {"kind": "maze", "path": tmp_path / "train.csv", "held_out": 0.5}
    kind = settings.MazeData if maze else settings.EmbeddedData
    made = Puzzles(
        settings.PuzzlesConfig(halt_steps=5),
        model=settings.Model(),
        data=kind(**data, augment=augment, augmentations=augmentations, cache=tmp_path / "cache"),
    )
    made.setup()
    for purpose, source in (("train", made.data()), ("eval", made.held_out())):
        assert source is not None
        rows = np.arange(len(source)).repeat(2)[::-1]
        indices = SampleIndices(np.arange(len(rows)), rows, np.arange(len(rows)) % 2)
        request = Request(0, range(len(rows)), indices)
        together, alone = (
            BatchBuilder(made, source, 7, purpose, contents=True, together=way).make(request) for way in (True, False)
        )
        assert together.arrays.keys() == alone.arrays.keys()
        for name, array in together.arrays.items():
            assert array.dtype == alone.arrays[name].dtype and array.tobytes() == alone.arrays[name].tobytes()
        assert together.info is not None and alone.info is not None
        assert together.info.contents.tolist() == alone.info.contents.tolist()
        if purpose == "train" and augment:
            assert len(np.unique(together.arrays[f"{source.kind}/question"], axis=0)) > len(source)
