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
    import yaml
    from pydantic import ValidationError

    from unisono.proof.scripts.script_proof import ScriptSettings, prove_script
    from unisono.runtime.errors import ConfigError

    end = words.index("--") if "--" in words else len(words)
    values = {}
    for word in words[1:end]:
        name, equals, value = word.partition("=")
        if not equals or name not in ScriptSettings.model_fields:
            raise ConfigError(
                f"'{word}' is not a setting of a proof of a script ({', '.join(ScriptSettings.model_fields)}); "
                f"arguments of the script stand after `--`: unisono prove {words[0]} worlds=[1,2] -- {word}"
            )
        try:
            values[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"'{word}' cannot be parsed: {str(error).splitlines()[0]}") from None
    try:
        settings = ScriptSettings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            "; ".join(f"{e['loc'][0]}: {e['msg']}, got {e['input']!r}" for e in error.errors())
        ) from error
    report = prove_script(Path(words[0]), words[end + 1 :], settings)
    say("\n".join(report.lines))
    return report.exit_code
