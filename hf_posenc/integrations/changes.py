"""What this package changes in other packages, written down so that it can be put back."""

import functools
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..modeling.stock_interface import tells_versions


MISSING = object()
# Attribute of PreTrainedModel: what is installed, found there by other copies of this package as well.
INSTALLED = "_hf_posenc"


class Changes:
    """Changes to classes, modules and dictionaries that belong to others.

    Others may change the same things, before and after. What they found here is not taken from under them: [`undo`] puts
    back what still is as it was left, and nothing else. A function of ours that somebody has wrapped since then stays
    inside their wrapper, so each reads `active` and only passes calls on once that is False.

    Attributes:
        active: False once the changes have been undone.
    """

    def __init__(self) -> None:
        self.active = True
        self._undo: list[Callable[[], None]] = []

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a class or module, as `setattr` does."""
        found = vars(owner).get(name, MISSING)
        setattr(owner, name, value)

        def undo() -> None:
            if vars(owner).get(name, MISSING) is not value:
                return
            if found is not MISSING:
                setattr(owner, name, found)
            elif name != "__new__":
                # CPython cannot take `__new__` off a class again: without it, all that derive from the class refuse arguments
                # (object.__new__ takes them only where `__new__` was never set). It stays, and passes everything on.
                delattr(owner, name)

        self._undo.append(undo)

    def set_entry(self, table: dict, key: Any, value: Any) -> None:
        """Set an entry of a dictionary."""
        found = table.get(key, MISSING)
        table[key] = value

        def undo() -> None:
            if table.get(key, MISSING) is not value:
                return
            if found is MISSING:
                del table[key]
            else:
                table[key] = found

        self._undo.append(undo)

    def to_undo(self, function: Callable[[], None]) -> None:
        """Have a change of another kind undone by `function`."""
        self._undo.append(function)

    def undo(self) -> None:
        """Put everything back, the last change first. Twice is once."""
        self.active = False
        while self._undo:
            self._undo.pop()()


def finder(owner: type, name: str) -> Callable[[type], Callable]:
    """What a class's method is before it is hooked, as `getattr` would give it, by the class that it is called on.

    A method that the class has not itself is looked up anew with each call, behind the class, as Python does.
    """
    found = vars(owner).get(name, MISSING)
    bind = getattr(type(found), "__get__", None)

    def find(cls: type) -> Callable:
        if found is MISSING:
            return getattr(super(owner, cls), name)
        return found if bind is None else bind(found, None, cls)

    return find


def hook_class_method(changes: Changes, owner: type, name: str, method: Callable) -> None:
    """Put `method` in place of a class method; it gets what it found there, bound to the class, before its arguments."""
    find = finder(owner, name)

    @functools.wraps(getattr(getattr(owner, name), "__func__", getattr(owner, name)))
    def hook(cls, *args, **kwargs):
        original = find(cls)
        return method(original, cls, *args, **kwargs) if changes.active else original(*args, **kwargs)

    changes.set_attribute(owner, name, classmethod(tells_versions(hook)))


def hook_method(changes: Changes, owner: type, name: str, method: Callable) -> None:
    """Put `method` in place of a method; it gets what it found there, bound to the instance, before its arguments."""
    find = finder(owner, name)

    @functools.wraps(getattr(owner, name))
    def hook(self, *args, **kwargs):
        original = find(type(self)).__get__(self)
        return method(original, self, *args, **kwargs) if changes.active else original(*args, **kwargs)

    changes.set_attribute(owner, name, tells_versions(hook))


class AtImport(MetaPathFinder):
    """Waits for the import of a module, leaves it to the other finders, and does something when it has run."""

    def __init__(self, name: str, then: Callable[[], None]):
        self.name, self.then = name, then
        self.searching = threading.local()

    def wait(self, changes: Changes) -> None:
        """From now on, until the module is imported or the changes are undone."""
        sys.meta_path.insert(0, self)
        changes.to_undo(lambda: self in sys.meta_path and sys.meta_path.remove(self))

    def find_spec(self, fullname, path, target=None) -> ModuleSpec | None:
        # Another package may wait in the same way: its finder calls this one, by which it was called.
        if fullname != self.name or getattr(self.searching, "now", False):
            return None
        self.searching.now = True
        try:
            found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self.searching.now = False
        # Looking whether it is installed leads here too: only when its code runs is the waiting over.
        if spec is not None and hasattr(spec.loader, "exec_module"):
            waiting = Changes()
            execute = functools.partial(self._execute, spec.loader.exec_module, waiting)
            waiting.set_attribute(spec.loader, "exec_module", execute)
        return spec

    def _execute(self, exec_module: Callable, waiting: Changes, module: ModuleType) -> None:
        waiting.undo()
        exec_module(module)
        if module.__name__ == self.name and self in sys.meta_path:
            sys.meta_path.remove(self)
            self.then()
