"""Read speech of one voice on two processes: loss per codebook, a kill and its resume, and exports that others load.

    python benchmarks/speech_ljspeech.py ../shared/data/speech_ljspeech [--out runs/ljspeech] [--steps 120] [SETTING …]

The small model of the recipe learns the recordings whole. A second run of the same settings has a process killed on its
way and is started again; losses, gradient norms and the arrays of the last checkpoint are compared with the first, bit
for bit. Then the model is exported, adapters are trained on it (`adapter=higgs`), and exported alone and merged. A
process that knows transformers and PEFT and nothing of Unisono loads both and generates greedily after equal prompts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import unisono
from unisono import SampleContext, generator
from unisono.checkpoint.core import commit
from unisono.observe import events
from unisono_speech import generate
from unisono_speech.data import labels
from unisono_speech.task import Speech

FRAMES = 40  # that are generated after each prompt
PLAIN = """
import sys
import numpy as np, torch
from transformers import HiggsAudioV2ForConditionalGeneration

base, adapter, prompts, frames, out = sys.argv[1:]
model = HiggsAudioV2ForConditionalGeneration.from_pretrained(base)
if adapter:
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, adapter)
model.eval()
made = {}
with np.load(prompts) as given:
    for number in range(len(given.files) // 2):
        inputs = {"input_ids": torch.from_numpy(given[f"ids_{number}"])[None]}
        inputs["audio_input_ids"] = torch.from_numpy(given[f"frames_{number}"])[None]
        inputs["audio_input_ids_mask"] = torch.ones(inputs["audio_input_ids"].shape[:2], dtype=torch.bool)
        with torch.no_grad():
            end = model.config.eos_token_id
            said = model.generate(**inputs, do_sample=False, max_new_tokens=int(frames), eos_token_id=end)
        made[str(number)] = said[0, inputs["audio_input_ids"].shape[1]:].numpy()
np.savez(out, **made)
assert not any(name.split(".")[0] == "unisono" for name in sys.modules)
"""


@dataclass(frozen=True)
class Job:
    """Where runs are, and what all of them have in common.

    Attributes:
        folder: of all runs.
        words: settings of every run.
    """

    folder: Path
    words: tuple[str, ...]

    def train(self, name: str, *more: str, fails: bool = False) -> Path:
        """The folder of a run that has ended well, or that has not, where that is what it should do."""
        words = ["train", "speech", *self.words, f"run.dir={self.folder}", f"run.name={name}", *more]
        done = subprocess.run([sys.executable, "-m", "unisono", *words], capture_output=True, text=True)
        if (done.returncode != 0) != fails:
            raise SystemExit(f"{name} ended with exit status {done.returncode}:\n{done.stderr}")
        return self.folder / name

    def export(self, run: Path, name: str, *more: str) -> Path:
        """The folder that `unisono export` writes."""
        out = self.folder / name
        if not out.is_dir():
            words = ["export", str(run), f"out={out}", *more]
            subprocess.run([sys.executable, "-m", "unisono", *words], check=True, stdout=subprocess.DEVNULL)
        return out


def steps(run: Path) -> list[dict[str, Any]]:
    """What each update reported."""
    return events.step_events(events.read_events(run / "events.jsonl"))


def same_bits(one: Path, other: Path) -> tuple[int, int]:
    """How many updates and arrays of two runs' last checkpoints were compared, all of them equal.

    Raises:
        AssertionError: naming the first that differs.
    """
    ours, theirs = steps(one), steps(other)
    assert [s["step"] for s in ours] == [s["step"] for s in theirs]
    values = [name for name in ours[0] if name.startswith(("loss", "accuracy", "grad_norm", "lr"))]
    for a, b in zip(ours, theirs, strict=True):
        for name in values:
            assert a[name] == b[name], (a["step"], name, a[name], b[name])
    first, second = (_arrays(run) for run in (one, other))
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.tobytes() == second[name].tobytes(), name
    assert events.last_evaluation(events.read_events(one / "events.jsonl")) == events.last_evaluation(
        events.read_events(other / "events.jsonl")
    )
    return len(ours), len(first)


def prompts_of(run: Path, count: int) -> list[labels.Row]:
    """Prompts from held-out recordings: the reference as in an evaluation, and the text that is to be said."""
    task = cast(Speech, unisono.open_run(run).task)
    held_out = task.held_out()
    assert held_out is not None
    context = SampleContext(generator("benchmark"), training=False)
    talks = [task.library.conversation(held_out[number], context) for number in range(count)]
    return [labels.prompt_of(talk.messages[: talk.start], task.tokens, task.stream, task.codes) for talk in talks]


def said_here(run: Path, prompts: list[labels.Row], frames: int) -> list[NDArray[np.int64]]:
    """The codes that a run's own model generates after each prompt."""
    opened = unisono.open_run(run)
    task, model = cast(Speech, opened.task), opened.load_model()
    return [generate.speak(model, task, [row], generate.Sampling(), frames)[0][0] for row in prompts]


def said_elsewhere(
    run: Path, base: Path, adapter: Path | None, prompts: list[labels.Row], frames: int
) -> list[NDArray[np.int64]]:
    """The codes that transformers and PEFT generate in a process of their own."""
    stream = cast(Speech, unisono.open_run(run).task).stream
    prompts_path, out = run / "prompts.npz", run / "said-elsewhere.npz"
    arrays = {f"ids_{n}": row.ids for n, row in enumerate(prompts)} | {
        f"frames_{n}": row.frames for n, row in enumerate(prompts)
    }
    np.savez(prompts_path, **arrays)  # type: ignore[arg-type]  # numpy's stub takes them for its own keywords
    most = str(frames + stream.codebooks + 1)
    words = [sys.executable, "-c", PLAIN, str(base), str(adapter or ""), str(prompts_path), most, str(out)]
    subprocess.run(words, check=True)
    with np.load(out) as spoken:
        return [stream.restore(spoken[str(number)])[0][:frames] for number in range(len(prompts))]


def kill_and_resume(job: Job, name: str, at: int, *more: str) -> Path:
    """A run of which process 1 is killed in the pass of a step, started again."""
    job.train(name, *more, "--fault", f"rank=1,step={at},phase=forward,act=kill", fails=True)
    assert len(steps(job.folder / name)) < at
    return job.train(name, *more)


def _arrays(run: Path) -> dict[str, NDArray[Any]]:
    reader = commit.open_checkpoint(commit.find_checkpoints(run / "checkpoints")[-1]).reader()
    return {name: reader.read(name, (0,) * len(shape), shape) for name, shape in reader.shapes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/ljspeech"))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("settings", nargs="*", help="of every run, e.g. layout.threads=1")
    arguments = parser.parse_intermixed_args()
    every = arguments.steps // 4
    words = (
        "data=folder", f"data.path={arguments.data.resolve()}", "data.held_out=0.1", "layout.world_size=2",
        "layout.strategy=ddp", "layout.device=cpu", "layout.threads=1", "layout.micro_batch=4", "observe.trackers=[]",
        f"train.steps={arguments.steps}", f"eval.every={every}", f"checkpoint.every={every}", *arguments.settings,
    )  # fmt: skip
    job = Job(arguments.out.resolve(), words)

    began = time.perf_counter()
    whole = job.train("whole")
    print(f"{arguments.steps} steps on 2 processes: {time.perf_counter() - began:.0f} s with everything")
    figures = steps(whole)
    evaluated = events.last_evaluation(events.read_events(whole / "events.jsonl"))
    print("| | step 1 | last 10 steps | held out |\n|---|---|---|---|")
    for name in [name for name in figures[0] if name.startswith("loss")]:
        last = np.mean([step[name] for step in figures[-10:]])
        print(f"| {name} | {figures[0][name]:.3f} | {last:.3f} | {evaluated.get(name, float('nan')):.3f} |")
    print({name: round(value, 4) for name, value in evaluated.items() if "accuracy" in name})

    cut = kill_and_resume(job, "cut", arguments.steps * 5 // 8)
    updates, arrays = same_bits(cut, whole)
    print(f"killed and resumed: {updates} updates and {arrays} arrays of the last checkpoint, all equal bit for bit")

    base = job.export(whole, "base")
    adapters = (
        "model=pretrained", f"model.path={base}", "adapter=higgs", f"train.steps={max(4, arguments.steps // 4)}",
        "eval.every=null",
    )  # fmt: skip
    tuned = job.train("adapters", *adapters)
    again = kill_and_resume(job, "adapters-cut", max(3, arguments.steps // 6), *adapters, "checkpoint.every=2")
    updates, arrays = same_bits(again, tuned)
    print(f"the same with adapters and their dropout: {updates} updates, {arrays} arrays")
    adapter, merged = job.export(tuned, "adapter"), job.export(tuned, "merged", "merge=true")
    prompts = prompts_of(tuned, 3)
    ours = said_here(tuned, prompts, FRAMES)
    for name, folder, own in (("PEFT", base, adapter), ("transformers, merged", merged, None)):
        theirs = said_elsewhere(tuned, folder, own, prompts, FRAMES)
        equal = [np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)]
        print(f"{name}: {sum(equal)} of {len(equal)} prompts continued with the same codes")
    without = said_here(whole, prompts, FRAMES)
    same = all(np.array_equal(a, b) for a, b in zip(ours, without, strict=True))
    print(f"{[len(codes) for codes in ours]} frames; the adapters changed what is said: {not same}")


if __name__ == "__main__":
    main()
