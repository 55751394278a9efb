"""Attribute replacements that are undone: the only way in which this project changes other packages' modules."""

import functools
import inspect
import traceback
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
    _require(owner, name)
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
def around(owner: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """Inside the context ``owner.name(*args, **kwargs)`` runs ``call(stock, *args, **kwargs)``.

    Args:
        owner: a module or a class, or an object whose functions ``__getattr__`` finds.
        name: name of a function, a method or a static method. The name and the signature that ``inspect`` shows stay.
        call: receives the replaced function as ``stock``; for a method, ``self`` is the first of ``args``.

    Raises:
        AttributeError: ``owner`` has no such attribute.
    """
    _require(owner, name)
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return call(stock, *args, **kwargs)

    is_static = isinstance(inspect.getattr_static(owner, name, None), staticmethod)
    with replaced(owner, name, staticmethod(replacement) if is_static else replacement):
        yield


def raised_by(error: BaseException, function: Callable[..., Any]) -> bool:
    """Whether a function itself raised an error, and nothing that it called; also if :func:`around` replaces it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code is getattr(inspect.unwrap(function), "__code__", None)


def _require(owner: Any, name: str) -> None:
    if not hasattr(owner, name):
        raise AttributeError(f"{getattr(owner, '__name__', owner)!s} has no attribute {name!r} to replace")
