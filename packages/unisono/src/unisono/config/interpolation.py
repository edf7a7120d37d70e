"""What a value may refer to (`${key}`): other keys, never the environment, and together no more than a budget.

References to references grow as powers do: 289 bytes of YAML once kept a start busy for minutes. OmegaConf knows no
limit, so its one function that resolves a reference is counted while a configuration is composed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOOK_UPS = 2_000
SIZE = 1 << 20  # characters of texts and values of groups that references stand for


@contextmanager
def limit_references() -> Iterator[None]:
    """The context in which OmegaConf resolves references within the budget, and reads no variables.

    Raises:
        InterpolationResolutionError: of OmegaConf, with a sentence, for a reference that is refused.
    """
    from omegaconf import Container, OmegaConf
    from omegaconf.errors import InterpolationResolutionError
    from omegaconf.resolvers import oc

    spent = [0, 0]
    known: dict[int, tuple[Any, int]] = {}  # with the object, so that its number stays its own
    resolve = Container.resolve_parse_tree

    def refuse(name: str, *_: Any) -> None:
        raise ValueError(
            f"${{oc.env:{name}}}: a configuration is saved to files, so it may not read environment variables; "
            'write key="$VARIABLE" in the command, or let the task read a secret from os.environ where it needs it'
        )

    def count() -> None:
        if spent[0] > LOOK_UPS or spent[1] > SIZE:
            raise InterpolationResolutionError(
                f"references (${{key}}) to references stand for more than {LOOK_UPS} look-ups or {SIZE} characters; "
                "write the values out"
            )

    def counting_call(self: Container, *args: Any, **kwargs: Any) -> Any:
        spent[0] += 1
        count()
        found = resolve(self, *args, **kwargs)
        if id(found) not in known:
            known[id(found)] = found, _size(found)
        spent[1] += known[id(found)][1]
        count()
        return found

    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)
    Container.resolve_parse_tree = counting_call
    try:
        yield
    finally:
        Container.resolve_parse_tree = resolve
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _size(found: Any) -> int:
    """Characters of a text, values of a group; references in it are counted when they are resolved."""
    from omegaconf import Container, OmegaConf

    if not isinstance(found, Container):
        return len(str(found))
    pending, count = [OmegaConf.to_container(found, resolve=False)], 0
    while pending:
        value = pending.pop()
        count += 1
        pending += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return count
