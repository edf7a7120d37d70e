"""The puzzle task without its model and the few operations that differ between torch and JAX."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from typing_extensions import TypedDict

from unisono import (
    Batch,
    ConfigError,
    Context,
    DataError,
    Joined,
    Loss,
    SampleColumns,
    SampleContext,
    SampleContexts,
    Source,
    Task,
    read_asset,
)
from unisono.recipe_tools import cache_entry
from unisono_puzzles import settings
from unisono_puzzles.batches import Fields, PuzzlesOfKind, fields_of, find_kind, with_kind
from unisono_puzzles.catalogue import Catalogue, KindJson
from unisono_puzzles.data.arrays import StoredPuzzle
from unisono_puzzles.data.formats import ARC_SIDE, Puzzle
from unisono_puzzles.data.library import Library, open_libraries
from unisono_puzzles.data.prepared import PuzzlePreparation
from unisono_puzzles.model import act, scores, votes
from unisono_puzzles.model.shape import Kind, inner_width, places, step_flops
from unisono_puzzles.predictions import describe_solutions

_ASSET = "puzzles.json"
_LEAST_WIDTH = 8  # features of a head in a model that is made smaller


class _Assets(TypedDict):
    kinds: dict[str, KindJson]
    data: dict[str, Any]


class PuzzlesTask(Task):
    """Questions and answers as tokens, and rows that work at one puzzle for several steps.

    The loss has the terms `answer` and `halt`, and `q_continue` and `consistency` where they have a weight; each counts
    rows. Arrays of a batch and of the carry are called `<kind>/<name>`, since a micro-batch holds one kind of puzzle.
    """

    Config = settings.PuzzlesConfig
    Model = settings.Model
    Data = settings.PuzzlesData

    config: settings.PuzzlesConfig
    model_config: settings.Model
    data_config: Any
    _predict_only = False  # all puzzles are held out, and need no answers
    _run_catalogue: Catalogue | None = None  # of the run that is used

    # data -------------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Open the puzzles."""
        _ = self.libraries

    def data(self) -> Source | Mapping[str, Source]:
        """The puzzles to train on; of several kinds, by name."""
        rows: dict[str, Source] = {
            name: PuzzlesOfKind(name, library.training) for name, library in self.libraries.items()
        }
        return rows if len(rows) > 1 else next(iter(rows.values()))

    def held_out(self) -> Source | None:
        """The held-out puzzles, one kind after another."""
        found = {name: library.held_out for name, library in self.libraries.items()}
        rows = {
            name: PuzzlesOfKind(name, puzzles)
            for name, puzzles in found.items()
            if puzzles is not None and len(puzzles)
        }
        return Joined(rows) if len(rows) > 1 else next(iter(rows.values()), None)

    def sample(self, record: tuple[str, Puzzle | StoredPuzzle], context: SampleContext) -> Fields:
        """A puzzle, augmented in training, and the random draws that decide when its row may halt."""
        kind, puzzle = record
        library = self.libraries[kind]
        if self.votes_in(kind) and not context.training:
            return {"kind": kind, **self._variants(library, puzzle), "level": np.int32(-1)}
        example = library.example(puzzle, context.rng if context.training else None)
        fields: Fields = {
            "kind": kind,
            "question": example.question,
            "answer": example.answer,
            "identifier": np.int32(example.identifier),
        }
        # A training batch has all that an evaluation's has: JAX traces the evaluation before the first step on one.
        rating = np.array([np.nan if context.training else example.rating])
        fields["level"] = self.catalogue.levels_of(kind, rating)[0]
        if context.training:
            fields["explore"] = np.float32(context.rng.random())
            fields["patience"] = np.int32(self._patience(context.rng.random()))
        return fields

    def sample_batch(self, records: Any, contexts: SampleContexts) -> Sequence[Fields]:
        """What `sample` builds of each puzzle; Sudokus and mazes, which have one shape, are built all at once."""
        if not isinstance(records, PuzzlesOfKind) or self.libraries[records.kind].format.kind == "arc":
            return [self.sample(record, context) for record, context in zip(records, contexts, strict=True)]
        kind, puzzles, library = records.kind, records.puzzles, self.libraries[records.kind]
        count, training = len(puzzles), contexts.training
        draws = contexts.rng.random(library.draws + 2) if training else None
        if draws is None:
            questions, answers = puzzles.questions, puzzles.answers
            levels = self.catalogue.levels_of(kind, puzzles.ratings)
        else:
            boards = library.examples(puzzles, draws[:, :-2])
            questions, answers = boards[:, 0], boards[:, 1]
            levels = np.full(count, -1, dtype=np.int32)
        fields: Fields = {
            "kind": [kind] * count,
            "question": questions,
            "answer": answers,
            "identifier": np.zeros(count, dtype=np.int32),
            "level": levels,
        }
        if draws is not None:
            fields["explore"] = draws[:, -2].astype(np.float32)
            fields["patience"] = self._patience(draws[:, -1]).astype(np.int32)
        return SampleColumns(**fields)

    def collate(self, samples: Sequence[Fields]) -> Batch:
        """A batch of one kind: `question` and `answer` (rows, cells) uint8, and numbers per row."""
        together = samples.fields if isinstance(samples, SampleColumns) else None
        kinds = sorted(set(together["kind"]) if together else {sample["kind"] for sample in samples})
        if len(kinds) > 1:
            weights = ", ".join(f"{kind}: 1" for kind in self.kinds)
            raise DataError(
                f"a micro-batch would hold puzzles of several kinds ({', '.join(kinds)}), and it can hold one; set "
                f"data.mixture={{weights: {{{weights}}}, grouped: true}}"
            )
        held = {
            name: together[name] if together else np.stack([sample[name] for sample in samples])
            for name in samples[0]
            if name != "kind"
        }
        return with_kind(kinds[0], held)

    def counts(self, batch: Batch) -> dict[str, float]:
        """The number of rows with a known answer, for every term."""
        answers = np.asarray(fields_of(batch, self.kind_of(batch))["answer"])
        return dict.fromkeys(scores.term_weights(self.config), float((answers > 0).any(axis=1).sum()))

    def work(self, batch: Batch) -> dict[str, float]:
        """The number of puzzles, and the FLOPs of a supervision step at the full depth."""
        kind, rows, config = self.kind_of(batch), float(len(next(iter(batch.values())))), self.model_config
        return {"puzzles": rows, "flops": rows * step_flops(self.kinds[kind], config, config.h_cycles, config.l_cycles)}

    # the model --------------------------------------------------------------------------------------------------

    def cycles(self, scalars: Mapping[str, Any]) -> tuple[int, int]:
        """H cycles and L cycles at this step: scheduled values are rounded to whole numbers."""
        config = self.model_config
        h_cycles, l_cycles = scalars.get("h_cycles", config.h_cycles), scalars.get("l_cycles", config.l_cycles)
        return max(1, round(float(h_cycles))), max(1, round(float(l_cycles)))

    def exploration(self, scalars: Mapping[str, Any]) -> Any:
        """The fraction of rows that must not halt before a random step."""
        return scalars.get("halt_exploration", self.config.halt_exploration)

    def votes_in(self, kind: str) -> bool:
        """Whether evaluation takes a vote over augmentations of each question of this kind."""
        return self.config.votes > 1 and self.kinds[kind].format.kind == "arc"

    @property
    def competing(self) -> bool:
        """Whether the Q-value of halting must exceed that of continuing (HRM)."""
        return self.config.weights.q_continue > 0

    @property
    def catalogue(self) -> Catalogue:
        """What is known of the puzzles without their data; of a run that is used, what it was trained on."""
        return self._own_catalogue if self._run_catalogue is None else self._run_catalogue

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kinds of puzzles, by name."""
        return self.catalogue.kinds

    def kind_of(self, batch: Mapping[str, Any]) -> str:
        """The kind of puzzles that a batch holds."""
        return find_kind(batch, list(self.kinds))

    def predictions(self, outputs: Any, batch: Batch) -> dict[str, Any]:
        """The columns of `unisono predict`; see `predictions.describe_solutions`."""
        kind = self.kind_of(batch)
        fields = {name: np.asarray(value) for name, value in fields_of(batch, kind).items()}
        return describe_solutions(fields_of(outputs, kind), fields, self.kinds[kind].format, self.config.pass_at)

    # around the run ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the settings against the puzzles."""
        for name in self.kinds:
            most = getattr(self.libraries[name].config, "augmentations", None)
            if self.votes_in(name) and (most is None or self.config.votes > most + 1):
                raise ConfigError(
                    f"task.votes={self.config.votes}, but each task of {name} has {most or 0} augmentations besides "
                    "itself (data.augmentations); votes need data=arc"
                )
        if self.config.votes > 1 and not any(map(self.votes_in, self.kinds)):
            raise ConfigError(f"task.votes={self.config.votes} is for ARC, and there is none; use 1")

    def facts(self) -> dict[str, Any]:
        """Sizes of the puzzles and of the model."""
        described = {name: library.facts() for name, library in self.libraries.items()}
        return next(iter(described.values())) if len(described) == 1 else described

    def save_assets(self, directory: Path) -> None:
        """Save the kinds of puzzles, so that the run can be used without its data."""
        described = {"kinds": self.catalogue.to_json(), "data": self.data_config.model_dump(mode="json")}
        (directory / _ASSET).write_text(json.dumps(described), encoding="utf-8")

    def load_assets(self, directory: Path) -> None:
        """Use the kinds of a run. Of data other than the run's, all puzzles are solved, with or without answers."""
        described = read_asset(directory, _ASSET, _Assets)
        self._run_catalogue = Catalogue.from_json(described["kinds"])
        self._predict_only = described["data"] != self.data_config.model_dump(mode="json")

    def shrink(self, limit: int) -> PuzzlesTask | None:
        """The same puzzles with a narrower model and fewer cycles."""
        config = self.model_config
        size = config.width * config.layers * config.nets * (4 * config.width + 3 * inner_width(config.width, config))
        fewer = {
            "width": min(config.width, _LEAST_WIDTH * config.heads),
            "prefix": min(config.prefix, 2),
            "embedding": min(config.embedding, _LEAST_WIDTH),
            "inner_multiple": min(config.inner_multiple, 8),
            "h_cycles": min(config.h_cycles, 2),
            "l_cycles": min(config.l_cycles, 2),
        }
        small = config.model_copy(update=fewer)
        if size <= limit or small == config:
            return None
        return type(self)(self.config, model=small, data=self.data_config)

    @cached_property
    def libraries(self) -> dict[str, Library]:
        """The puzzles, by kind.

        Raises:
            DataError: if a run is given puzzles of a kind that it was not trained on.
        """
        found = open_libraries(self.data_config, self._predict_only)
        for name, library in found.items() if self._predict_only else ():
            known = self.kinds.get(name)
            if known is None or known.format != library.format:
                trained = ", ".join(f"{one} {kind.format.size}" for one, kind in self.kinds.items())
                raise DataError(f"these puzzles are {name} {library.format.size}, and the run was trained on {trained}")
            if library.tasks:
                found[name] = library.with_tasks_of_run(self.catalogue.tasks[name], known.embeddings)
            elif known.embeddings < library.embeddings:
                raise DataError(
                    f"these puzzles need {library.embeddings} puzzle embeddings, and the run has {known.embeddings}"
                )
        return found

    @cached_property
    def _own_catalogue(self) -> Catalogue:
        return Catalogue.of(self.libraries)

    def _variants(self, library: Library, puzzle: Any) -> Fields:
        """A question in its first augmentations, with the symmetry and colours of each."""
        examples = [library.variant(puzzle, number) for number in range(self.config.votes)]
        changes = [library.arc_variant(puzzle.group, number) for number in range(self.config.votes)]
        return {
            "question": np.stack([example.question for example in examples]),
            "answer": puzzle.answer,
            "identifier": np.array([example.identifier for example in examples], dtype=np.int32),
            "symmetry": np.array([change.symmetry for change in changes], dtype=np.int32),
            "colours": np.stack([change.colours for change in changes]).astype(np.int32),
        }

    def preparation(self) -> dict[str, tuple[PuzzlePreparation, Path]]:
        """What `unisono data prepare` writes: the augmented training puzzles and the held-out ones."""
        found: dict[str, tuple[PuzzlePreparation, Path]] = {}
        for kind, library in self.libraries.items():
            for part, made in library.preparations().items():
                digest = hashlib.sha256(json.dumps(made.inputs, sort_keys=True).encode()).hexdigest()[:16]
                name = part if len(self.libraries) == 1 else f"{kind}/{part}"
                found[name] = (made, cache_entry("puzzles", digest, *name.split("/")))
        return found

    def _patience(self, draws: Any) -> Any:
        """The first step at which a row that explores may halt: 2 to `halt_steps`, from random numbers."""
        return 2 + np.floor(draws * (max(2, self.config.halt_steps) - 1))

    # a step, on the Python array API; what differs between torch and JAX is defined by the task of each engine ------

    def zeros(self, shape: tuple[int, ...], like: Any) -> Any:
        """A float array of zeros, on the device of `like`."""
        raise NotImplementedError

    def constant(self, array: Any, like: Any) -> Any:
        """A NumPy array as an array of the engine, on the device of `like`."""
        raise NotImplementedError

    def without_gradient(self, compute: Callable[[], Any]) -> Any:
        """Call a function without gradients through its result."""
        raise NotImplementedError

    def repeat(self, advance: Callable[[Fields], Fields], state: Fields, times: int) -> Fields:
        """Apply `advance` `times` times."""
        raise NotImplementedError

    def sum_rows(self, value: Any) -> Any:
        """Values per row, (rows,), in the form that the engine expects in a `Loss`."""
        raise NotImplementedError

    def to_loss_precision(self, value: Any) -> Any:
        """Cast an array to the precision of the loss."""
        raise NotImplementedError

    def initial_carry(self, batch: Batch) -> Fields:
        """The initial state of all rows: each takes the first puzzle that it sees."""
        kind = self.kind_of(batch)
        fields = fields_of(batch, kind)
        shape = (len(fields["question"]), places(self.kinds[kind], self.model_config), self.model_config.width)
        return with_kind(
            kind, act.first_carry(fields, {name: self.zeros(shape, fields["question"]) for name in act.STATES})
        )

    def outputs(self, model: Any, batch: Batch, context: Context) -> Fields:
        """One supervision step of each row; in evaluation, all of them."""
        kind = self.kind_of(batch)
        fields = fields_of(batch, kind)
        cycles = self.cycles(context.scalars)
        if not context.training:
            return with_kind(kind, self._solve_and_vote(model, kind, fields, cycles))
        assert context.carry is not None
        rows = act.begin(fields_of(context.carry, kind), fields, model.starts)
        outputs = {**rows, **model(kind, rows, *cycles)._asdict()}
        if self.competing:  # the Q-value of continuing, from the model one step later
            last = rows["steps"] + 1 >= self.config.halt_steps
            outputs["value"] = self.without_gradient(lambda: act.continue_target(model(kind, outputs, *cycles).q, last))
        return with_kind(kind, outputs)

    def loss(self, outputs: Fields, batch: Batch, context: Context) -> Loss:
        """Loss and metrics; training metrics are of the rows that halt in this step."""
        kind = self.kind_of(batch)
        fields = fields_of(batch, kind)
        outputs = fields_of(outputs, kind)
        answers = outputs["answer"] if context.training else fields["answer"]
        terms, cells, exact = scores.terms(self.config, outputs, answers, self.to_loss_precision, context.training)
        sums = {name: self.sum_rows(value) for name, value in terms.items()}
        weights = {name: weight for name, weight in scores.term_weights(self.config).items() if name in sums}
        if not context.training:
            pairs = scores.evaluation_metrics(outputs, fields, cells, exact, self.catalogue.levels[kind])
            return Loss(sums, weights, self._metrics(kind, pairs, training=False))
        kept = self.without_gradient(lambda: {name: outputs[name] for name in ("q", *act.PUZZLE, *act.STATES)})
        q = kept.pop("q")
        exploration = self.exploration(context.scalars)
        halted = act.halt(outputs, q, fields, exploration, self.config.halt_steps, self.competing)
        pairs = scores.training_metrics(halted, q, cells, exact, self.competing)
        return Loss(sums, weights, self._metrics(kind, pairs, training=True), carry=with_kind(kind, {**kept, **halted}))

    def solve(self, model: Any, kind: str, fields: Mapping[str, Any], cycles: tuple[int, int]) -> Fields:
        """Run all supervision steps; also keep the answer of the step at which each puzzle would have halted."""
        carry = fields_of(self.initial_carry(with_kind(kind, fields)), kind)
        rows, xp = act.begin(carry, fields, model.starts), array_namespace(fields["question"])

        def advance(state: Fields) -> tuple[Fields, Any]:
            step = model(kind, {**rows, **{name: state[name] for name in act.STATES}}, *cycles)
            solution, done = xp.argmax(step.logits, axis=-1), state["done"]
            after = {name: xp.astype(value, state[name].dtype) for name, value in step.states.items()}
            after["early"] = xp.where(done[:, None], state["early"], xp.astype(solution, state["early"].dtype))
            after["early_steps"] = state["early_steps"] + xp.astype(~done, state["early_steps"].dtype)
            after["done"] = done | act.wants_to_halt(step.q, self.competing)
            return after, step

        state = {name: rows[name] for name in act.STATES} | {
            "early": xp.zeros_like(fields["question"], dtype=xp.int32),
            "early_steps": xp.zeros_like(carry["steps"]),
            "done": xp.zeros_like(carry["halted"]),
        }
        state = self.repeat(lambda before: advance(before)[0], state, self.config.halt_steps - 1)
        state, last = advance(state)
        return {
            "logits": last.logits,
            "solution": xp.argmax(last.logits, axis=-1),
            "q": last.q,
            "early": state["early"],
            "early_steps": state["early_steps"],
            "would_halt": act.wants_to_halt(last.q, self.competing),
        }

    def count_votes(self, answers: Any, q: Any, fields: Mapping[str, Any]) -> Fields:
        """The answers with most votes, their numbers of votes, and whether the right one is among the best.

        `answers` (questions · augmentations, 900) and `q` (questions · augmentations,) are of all augmentations.
        """
        xp, like = array_namespace(answers), fields["identifier"]
        index = self.constant(np.arange(ARC_SIDE, dtype=np.int32), like)
        symmetry, colours = fields["symmetry"], fields["colours"]
        grids = votes.restore(answers, xp.reshape(symmetry, (-1,)), votes.flatten(colours), index)
        grids = xp.reshape(grids, (*like.shape, grids.shape[1]))
        trust = xp.reshape(1 / (1 + xp.exp(-q)), like.shape)
        count, score = votes.rank(grids, trust, self.constant(votes.SALTS, like))
        truth = votes.restore(fields["answer"], symmetry[:, 0], colours[:, 0], index)
        won = {f"pass@{most}": votes.passes(grids, score, truth, most) for most in self.config.pass_at}
        best = xp.argsort(score, axis=1, descending=True)[:, : max(self.config.pass_at)]
        ranked = xp.take_along_axis(grids, best[..., None], axis=1)
        return {**won, "ranked": ranked, "votes": xp.take_along_axis(count, best, axis=1)}

    def _solve_and_vote(self, model: Any, kind: str, fields: Mapping[str, Any], cycles: tuple[int, int]) -> Fields:
        """The outputs of `solve` for each row; of augmented questions, those of the first, and the votes."""
        if fields["question"].ndim == 2:
            return self.solve(model, kind, fields, cycles)
        rows, many = fields["identifier"].shape
        xp = array_namespace(fields["question"])
        flat = {name: votes.flatten(fields[name]) for name in ("question", "identifier")}
        flat["answer"] = xp.repeat(fields["answer"], many, axis=0)
        solved = self.solve(model, kind, flat, cycles)
        won = self.count_votes(solved["solution"], solved["q"][:, 0], fields)
        return {name: xp.reshape(value, (rows, many, *value.shape[1:]))[:, 0] for name, value in solved.items()} | won

    def _metrics(self, kind: str, pairs: Mapping[str, tuple[Any, Any]], training: bool) -> dict[str, tuple[Any, Any]]:
        """The metrics of a micro-batch; those of other kinds are zero."""
        sums = {name: (self.sum_rows(value), self.sum_rows(count)) for name, (value, count) in pairs.items()}
        if len(self.kinds) == 1:
            return sums
        nothing = self.sum_rows(array_namespace(pairs["exact"][0]).zeros_like(pairs["exact"][0]))
        every: dict[str, tuple[Any, Any]] = {}
        for other in self.kinds:
            levels = [] if training else [f"rating/{level}" for level in self.catalogue.levels[other]]
            votes_ = [] if training or not self.votes_in(other) else [f"pass@{most}" for most in self.config.pass_at]
            for name in (*(scores.TRAINING if training else scores.EVALUATION), *levels, *votes_):
                every[f"{other}/{name}"] = sums[name] if other == kind else (nothing, nothing)
        return every
