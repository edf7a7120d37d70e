"""Record a command of the README as a picture of a terminal.

    python -m benchmarks.picture docs/pictures/prove.svg unisono prove spirals.py:Spirals layouts=[ddp:2,fsdp:2]

What the command prints is drawn as it is; only lines of progress are left out.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 110
_FONTS = re.compile(r"\s*@font-face \{.*?\n    \}(?=\n)", re.DOTALL)  # of a server: the reader's own will do
_PROGRESS = re.compile(r"^(all cases run|\d+ process(es)?$|case \d|\[\d| *\d+/\d+ )")


def main(file: Path, command: list[str]) -> None:
    environment = {**os.environ, "COLUMNS": str(WIDTH)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: PTH123, SIM115
    console.print(Text.assemble(("$ ", "bold green"), shlex.join(command)))
    for line in [*done.stdout.splitlines(), *done.stderr.splitlines()[-1:]]:
        if not _PROGRESS.match(line):
            text = Text(line)
            text.highlight_regex(r"\bPASS\b", "bold green")
            text.highlight_regex(r"\bFAIL\b", "bold red")
            console.print(text, soft_wrap=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    picture = console.export_svg(title="unisono prove")
    file.write_text(_FONTS.sub("", picture), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
