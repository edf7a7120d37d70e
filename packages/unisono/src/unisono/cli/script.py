"""`unisono prove train.py worlds=[1,2] -- its arguments`: proves a training script that was not written for Unisono."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unisono.runtime.console import say


def is_proof_of_script(words: Sequence[str]) -> bool:
    """Whether a command proves a script: its target is a file, not a class in one."""
    return words[:1] == ["prove"] and len(words) > 1 and words[1].endswith(".py")


def prove(words: Sequence[str]) -> int:
    """Prove a script; return the exit code.

    Args:
        words: The script, settings as `key=value`, and after `--` the arguments of the script.
    """
    from unisono.proof.scripts.script_proof import parse_settings, prove_script

    end = words.index("--") if "--" in words else len(words)
    settings = parse_settings(words[1:end])
    report = prove_script(Path(words[0]), words[end + 1 :], settings)
    say("\n".join(report.lines))
    return report.exit_code
