"""Writes the README's table: by how much the runs of many processes differ from those of one.

    python -m benchmarks.same_run [--write]
    python -m benchmarks.same_run --jax

The second prints the table for JAX, with the runs of `packages/unisono/tests/engines/jax/matrix.py`. In
the first, the runs are those of `tests/proofs/test_layouts_compute_the_same.py`: two small models, SGD, ten steps.
Differences are ‖a − b‖ / max(‖b‖, 10⁻³ ‖all gradients‖), the largest over tensors, models, and runs with and
without dropout.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

from benchmarks import page
from packages.unisono.tests.engines.jax import matrix as jax_matrix
from packages.unisono.tests.layouts import LAYOUTS
from packages.unisono.tests.runs import Trace, distance
from tests.proofs import matrix
from tests.proofs.matrix import CASES, Case

KINDS = ("gradients", "norms and losses", "parameters")


def differences(mine: Trace, reference: Trace) -> dict[str, float]:
    """The largest relative difference of each kind."""
    assert mine.rows == reference.rows
    scalars = zip(mine.norms + mine.losses, reference.norms + reference.losses, strict=True)
    return {
        "gradients": max(distance(mine.gradients, reference.gradients).values()),
        "norms and losses": max(abs(a - b) / abs(b) for a, b in scalars),
        "parameters": max(distance(mine.parameters, reference.parameters).values()),
    }


def table(traces: dict[Case, Trace]) -> str:
    """The rows of the README: strategies, the worst of their micro-batches, in both precisions."""
    lines = [
        "| compared with one process | precision | raw gradients, step 1 | norms and losses | parameters, step 10 |",
        "|---|---|---|---|---|",
    ]
    strategies: dict[str, list[str]] = {}
    for layout in LAYOUTS:
        strategies.setdefault(layout.split(" m")[0], []).append(layout)
    for name, layouts in strategies.items():
        for precision in matrix.TOLERANCE:
            differences_found = [
                differences(traces[case], traces[case.reference])
                for case in traces
                if case.layout in layouts and case.precision == precision and case.reference != case
            ]
            worst = [max(f[kind] for f in differences_found) for kind in KINDS]
            shown = "one process, other micro-batches" if name == "single" else name
            lines.append(f"| {shown} | {precision} | " + " | ".join(f"{value:.0e}" for value in worst) + " |")
    return "\n".join(lines) + "\n"


def jax_table() -> str:
    """The rows of the page on JAX, the worst of all passes; a model's runs in one precision at a time."""
    lines = [
        "| compared with one device | model | precision | raw gradients, step 1 | norms and losses "
        "| parameters, step 10 |",
        "|---|---|---|---|---|---|",
    ]
    for precision, model in itertools.product(jax_matrix.PRECISIONS, jax_matrix.MODELS):
        cases = [case for case in jax_matrix.CASES if (case.precision, case.model) == (precision, model)]
        traces = jax_matrix.run(cases)
        for kind in jax_matrix.KINDS:
            others = [case for case in cases if case.kind == kind and case.reference != case]
            if not others:  # one device draws dropout by its micro-batches, so it equals itself alone
                continue
            worst_of_cases = [differences(traces[case], traces[case.reference]) for case in others]
            worst = [max(f[name] for f in worst_of_cases) for name in KINDS]
            shown = "one device, other micro-batches" if kind == "single" else kind
            lines.append(f"| {shown} | {model} | {precision} | " + " | ".join(f"{w:.0e}" for w in worst) + " |")
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into README.md (not with --jax)")
    parser.add_argument("--jax", action="store_true", help="the runs of the JAX engine")
    arguments = parser.parse_args()
    if arguments.jax:
        text = jax_table()
    else:
        with tempfile.TemporaryDirectory() as folder:
            text = table(matrix.run(Path(folder), CASES))
    print(text)
    if arguments.write and not arguments.jax:
        page.put("same_run", text, "README.md")


if __name__ == "__main__":
    main()
