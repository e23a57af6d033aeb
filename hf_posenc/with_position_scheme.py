"""Another position scheme for a model in memory, similar to `peft.get_peft_model` for adapters."""

import copy as copying
from typing import Any

from ._utils import model_inside, module_inside
from .change_scheme import change_scheme, check_not_wrapped, is_exported
from .variants import check_flag_names


def with_position_scheme(model: Any, position_scheme: str | None, *, copy: bool = False, **flags: Any) -> Any:
    """Give a model in memory another position scheme, as `from_pretrained(..., position_scheme=...)` does for a checkpoint.

    The model is changed in place. Everything that does not depend on positions stays the same object: parameters (an optimizer keeps
    working), task head, hooks, device, dtype, training mode, and modules that you replaced. Parameters of new schemes are initialized
    as in `from_pretrained`. `model.config` becomes a new object. An object around the model, such as a class of yours or an
    encoder-decoder, keeps the old config until `save_pretrained`, which updates it.

    Args:
        model: a base model or a model with a task head, with or without a position scheme, of a supported family. Or an object that contains
            exactly one model of Transformers: a pipeline, a SentenceTransformer, a compiled model.
        position_scheme: as in a config. None turns the model back into Transformers' own class. Its scheme must then be that of the family's
            original checkpoints, such as "absolute".
        copy: change a copy, and leave the model unchanged.
        flags: other `position_*` config options. The model keeps its other options, as far as the new schemes have them.

    Returns:
        The object that was given, or its copy. The model's class is then the class with a position scheme (`Posenc...`), or Transformers' own.
        For a model that [`hf_posenc.to_stock`] made, a new model: the one before `to_stock`, with this scheme. The given one is unchanged.

    Raises:
        TypeError: `model` is not a PreTrainedModel and contains none, a config option has the wrong type, or a keyword is unknown.
        ValueError: the family is not supported, the class of the model is not one of Transformers or hf_posenc, the object contains several
            models, the model is wrapped by PEFT or for several processes or offloaded by accelerate, modules that contain positions were
            replaced or are shared, or a config option is wrong. The model is then unchanged.
    """
    check_flag_names(flags, ["copy"])
    check_not_wrapped(module_inside(model))
    if is_exported(model):
        from .export.stock import from_stock  # only here: it needs more libraries than a model does

        return change_scheme(from_stock(model), position_scheme, **flags)
    given = copying.deepcopy(model) if copy else model
    change_scheme(model_inside(given), position_scheme, **flags)
    return given
