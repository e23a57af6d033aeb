"""The models with positions. `schemes`, `attention` and `models` are saved with a checkpoint, as far as it needs them; `kernels`, which make
them fast, are not. Outside these folders: `torch_state`, `extras` and `stock_interface`."""

from .kernels import fast  # noqa: F401
