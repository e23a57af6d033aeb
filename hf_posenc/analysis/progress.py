"""How far a measurement is, for whoever shows it: what takes long goes over its steps by [`steps`], and [`told`] hears of each."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar


Step = TypeVar("Step")
Listener = Callable[[str, float], None]

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def steps(of: Iterable[Step], what: str, part: int = 0, parts: int = 1) -> Iterator[Step]:
    """Go over steps, and say so.

    Args:
        what: a step is, such as "rotation".
        part, parts: which part of the measurement these steps are, from 0, and of how many.
    """
    of = [*of]
    for number, step in enumerate(of):
        if (listener := _listener.get()) is not None:
            listener(f"{what} {number + 1} of {len(of)}", (part + number / len(of)) / parts)
        yield step


@contextmanager
def told(listener: Listener) -> Iterator[None]:
    """Have every step of what is measured here told: what it is, and the share of the measurement that is done before it."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)
