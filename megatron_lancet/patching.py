"""Attribute replacements that are undone: the one way in which this project changes a foreign module."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``owner.name = value`` and restore what was there when the context ends.

    Raises:
        AttributeError: ``owner`` has no such attribute, so the assumption behind the replacement is void.
    """
    if not hasattr(owner, name):
        raise AttributeError(f"{getattr(owner, '__name__', owner)!s} has no attribute {name!r} to replace")
    # vars(), not getattr: a class must get its plain function or staticmethod back, not a bound one.
    previous = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if previous is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, previous)


@contextmanager
def wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace ``owner.name`` by ``wrap(owner.name)`` for the length of the context."""
    with replaced(owner, name, wrap(getattr(owner, name))):
        yield
