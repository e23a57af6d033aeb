"""How a long distillation is followed and how it ends early: trackers, states in files, SIGTERM."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


SETTINGS_NAME = "hf_posenc-convert"


@dataclass(frozen=True)
class Following:
    """How a distillation is followed.

    Attributes:
        report_to: a tracker of accelerate, by name ("tensorboard", "wandb", ...), "all", or none.
        logging_dir: the folder of trackers that write files.
        save_minutes: the state is written at the first check, then once in so many minutes, at SIGTERM and at the end.

    Raises:
        ValueError: minutes below 0, or an unknown tracker.
        ImportError: the tracker is not installed.
    """

    report_to: str | None = None
    logging_dir: str = "runs"
    save_minutes: float = 1.0

    def __post_init__(self) -> None:
        if not self.save_minutes >= 0:
            raise ValueError(f"save_minutes must be at least 0, got {self.save_minutes}")
        if self.report_to is not None:
            _check_tracker(self.report_to)

    def keywords(self) -> dict[str, Any]:
        """Of `accelerate.Accelerator`."""
        if self.report_to is None:
            return {}
        return {"log_with": self.report_to, "project_dir": self.logging_dir}

    def begin(self, accelerator: Any, settings: dict[str, Any]) -> None:
        # Trackers of hyperparameters take numbers and strings.
        named = {name: value for name, value in settings.items() if isinstance(value, (int, float, str, bool))}
        accelerator.init_trackers(SETTINGS_NAME, config=named)

    def end(self, accelerator: Any) -> None:
        # `accelerator.end_training` would end the group of processes too, which a second conversion needs.
        for tracker in accelerator.trackers:
            tracker.finish()


def _check_tracker(name: str) -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers  # only here: it is optional

    if name == "all":
        return
    if name not in {*LOGGER_TYPE_TO_CLASS}:
        raise ValueError(f"report_to must be all, or one of {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}; got {name!r}")
    if name not in {str(one) for one in get_available_trackers()}:
        raise ImportError(f"report_to={name!r} needs the package of {name}, which is not installed")


class Timer:
    """Says at first, and whenever some minutes have gone by since, that it is time."""

    def __init__(self, minutes: float):
        self.seconds, self.last = 60 * minutes, -math.inf

    def is_due(self) -> bool:
        now = time.monotonic()
        if now - self.last < self.seconds:
            return False
        self.last = now
        return True


@contextmanager
def told_to_end() -> Iterator[Callable[[], bool]]:
    """Within, SIGTERM does not end the process; what is yielded says whether it came.

    Only the main thread can be told: in any other, the signal has its usual effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
