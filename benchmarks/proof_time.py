"""How long proofs take: of a recipe, of a small task, of a script, and the quick ones.

    python -m benchmarks.proof_time [ROUNDS] [NAME ...]

Every round runs each proof once, in turn. The processor's seconds (user and system, of all processes together) say
more on a busy machine than the wall clock; the load is printed beside them. All are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from benchmarks.start_up import UNISONO, measure_command

ROOT = Path(__file__).resolve().parents[1]
SPIRALS = str(ROOT / "examples" / "spirals.py:Spirals")
SCRIPT = str(ROOT / "tests/proofs/scripts" / "by_hand.py")
PROOFS = {
    "language": ["language"],
    "task": [SPIRALS],
    "script": [SCRIPT, "worlds=[1,2]", "--"],
    "language --quick": ["language", "--quick"],
    "task --quick": [SPIRALS, "--quick"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROOFS)} (default: all)")
    parsed = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(parsed.rounds):
            for name in parsed.names or PROOFS:
                load = os.getloadavg()[0]
                wall, processor = measure_command([*UNISONO, "prove", *PROOFS[name]], Path(folder))
                found.setdefault(name, []).append((wall, processor, load))
    print(f"{'':<20}{'wall, s':>10}{'CPU, s':>10}{'load before':>14}   (medians of {parsed.rounds})")
    for name, measured in found.items():
        wall, processor, load = (statistics.median(values) for values in zip(*measured, strict=True))
        print(f"{name:<20}{wall:>10.1f}{processor:>10.1f}{load:>14.1f}")


if __name__ == "__main__":
    main()
