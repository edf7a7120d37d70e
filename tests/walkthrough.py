"""Follow a page of the docs as a reader would: save its files, give its commands, run its snippets, in order.

* "Save this as `digits.py`" before a block of Python saves it; a block without is run, after `import unisono`.
* Lines of a `console` block that begin with `$` are given; one that ends with `# fails` has to fail.
* Blocks of any other kind are read, not run: commands for hosts or data that a test does not have.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SAVED = re.compile(r"[Ss]ave\s+this\s+as\s+`([\w./-]+)`[^`]*\Z")


def follow(page: Path, folder: Path, before: Callable[[str], None] = lambda command: None) -> dict[str, str]:
    """Do in a folder what a page says.

    Args:
        page: the page.
        folder: an empty folder.
        before: called with each command, before it is given.

    Returns:
        What each command wrote, its errors included; of a snippet, under its text.
    """
    text, wrote, end = page.read_text("utf-8"), {}, 0
    for block in _BLOCK.finditer(text):
        name = _SAVED.search(text[end : block.start()])
        end = block.end()
        if block[1] == "python" and name:
            (folder / name[1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / name[1]).write_text(block[2], "utf-8")
        elif block[1] == "python":
            snippet = folder / "snippet.py"  # a file: processes of a run import it again
            body = "".join(f"    {line}" for line in block[2].splitlines(keepends=True))
            snippet.write_text(f"import unisono\n\nif __name__ == '__main__':\n{body}", "utf-8")
            wrote[block[2]] = _run([sys.executable, "snippet.py"], folder, fails=False, stopped=False)
        else:
            for command in (line[2:] for line in block[2].splitlines() if line.startswith("$ ")):
                before(command)
                words, _, comment = command.partition("   # ")
                wrote[command] = _run(
                    shlex.split(words), folder, fails=comment.endswith("fails"), stopped=words.startswith("timeout")
                )
    return wrote


def _run(words: list[str], folder: Path, *, fails: bool, stopped: bool) -> str:
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        words, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1200
    )
    ended = f"{shlex.join(words)}: {done.returncode}\n{done.stdout[-3000:]}"
    assert stopped or done.returncode == (1 if fails else 0), ended
    return done.stdout
