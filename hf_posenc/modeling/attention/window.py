"""Local attention: layers in which a query sees only the keys near it, between layers in which it sees all."""

from ..schemes.flags import GLOBAL_EVERY, WINDOW, WINDOW_FLAGS


# Attention implementations that support a window.
BACKENDS = ("sdpa", "flex_attention", "eager")


def window_settings(config) -> dict[str, int]:
    """The two options of a config, with their defaults: what two models must have alike to compute the same."""
    return {
        flag.name: flag.default if (value := getattr(config, flag.name, None)) is None else value
        for flag in WINDOW_FLAGS
    }


def check_window(config) -> None:
    """Raise ValueError where the options of a config do not fit each other."""
    if getattr(config, GLOBAL_EVERY.name, None) is not None and getattr(config, WINDOW.name, None) is None:
        raise ValueError(
            f"{GLOBAL_EVERY.name}={getattr(config, GLOBAL_EVERY.name)} has no use without {WINDOW.name}: no layer is local"
        )


def reach_of(config, layer: int) -> int | None:
    """How many indices away a layer's queries see keys, `position_window // 2`; None for a global layer.

    Layers 0, n, 2n, ... are global, n being `position_global_every`.
    """
    settings = window_settings(config)
    width, every = settings[WINDOW.name], settings[GLOBAL_EVERY.name]
    if not width or (every and layer % every == 0):
        return None
    return width // 2
