"""Values from a file that anybody may have written: each is checked, and its fault says where it
is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compile_ext.ops.call_site import compiled

# Elements of the largest tensor that an allocator could be asked for: 2^40 float32 are 4 TiB.
MOST_ELEMENTS = 2**40
_LONGEST_EXPRESSION = 300  # characters; those of real graphs have up to about 60


class Fault(Exception):
    """What is wrong with a file: found, wanted and, where it is not to make the file anew, fix."""

    def __init__(self, found: str, wanted: str, fix: str = "") -> None:
        super().__init__(found)
        self.found, self.wanted, self.fix = _short(found), wanted, fix


class Fields:
    """The fields of a JSON object, each to be taken once."""

    def __init__(self, content: Any, at: str) -> None:
        if not isinstance(content, dict):
            raise Fault(f"{at} = {content!r}", "a JSON object")
        self.content, self.at = content, at
        self._taken: set[str] = set()

    def take(self, name: str) -> Any:
        if name not in self.content:
            raise Fault(f"{self.at} without a field {name!r}", "all fields")
        self._taken.add(name)
        return self.content[name]

    def end(self) -> None:
        """All fields must have been taken."""
        for name in self.content:
            if name not in self._taken:
                raise Fault(f"a field {name!r} in {self.at}", ", ".join(sorted(self._taken)))


def items(content: Any, at: str) -> Iterator[tuple[int, Any]]:
    if not isinstance(content, list):
        raise Fault(f"{at} = {content!r}", "a JSON list")
    return enumerate(content)


def text(content: Any, at: str) -> str:
    if not isinstance(content, str):
        raise Fault(f"{at} = {content!r}", "a text")
    return content


def number(content: Any, at: str, most: int = MOST_ELEMENTS, least: int = 0) -> int:
    if type(content) is not int or not least <= content <= most:
        raise Fault(f"{at} = {content!r}", f"a whole number from {least} to {most}")
    return content


def expression(content: Any, at: str) -> str:
    found = text(content, at)
    try:
        if len(found) > _LONGEST_EXPRESSION:
            raise ValueError("it is too long")
        compiled(found)
    except ValueError as error:
        raise Fault(
            f"{at} = {found!r}", "a number, or an expression in M: 4*((M + 3)//4)"
        ) from error
    return found


def _short(found: str) -> str:
    return found if len(found) <= 200 else f"{found[:200]}..."
