"""Another position scheme for a model in memory, as `peft.get_peft_model` is for adapters."""

import copy as copying
from typing import Any

from ._utils import model_inside, module_inside
from .change_scheme import change_scheme, check_not_wrapped, is_exported
from .variants import check_flag_names


def with_position_scheme(model: Any, position_scheme: str | None, *, copy: bool = False, **flags: Any) -> Any:
    """Give a model in memory another position scheme, as `from_pretrained(..., position_scheme=...)` gives one to a checkpoint.

    The model is changed in place. What it has in common with the new one stays what it is: parameters (an optimizer goes on
    with them), head, hooks, device, dtype, mode, and modules of the user's own wherever positions are not. Parameters of schemes that it
    lacks are new, and start as in `from_pretrained`. `model.config` becomes another object. What else holds the one of before, a class of
    the user's own around the model or an encoder-decoder, keeps that until it is saved: `save_pretrained` then brings it up to date.

    Args:
        model: a stock model or a variant, base model or head, of a family that has position schemes; or what holds one such model and
            no other of transformers: a pipeline, a SentenceTransformer, a compiled model.
        position_scheme: as in a config. None turns a variant whose scheme is what its family's stock models have into one of these.
        copy: leave the model as it is, and change a copy.
        flags: other `position_*` flags. A variant keeps those that it has, as far as they apply.

    Returns:
        What was given, or its copy. The model is then of the variant's class, or the stock class. A model that [`hf_posenc.to_stock`] made
        comes back as a new one, the model that it was, with this scheme; the one given stays as it is.

    Raises:
        TypeError: `model` is and holds no PreTrainedModel, a flag has the wrong type, or a keyword is none.
        ValueError: the model is of another family or a class of its own, there are several, it is wrapped by PEFT or for several processes,
            dispatched by accelerate, or has had modules replaced or shared where positions go; a flag is wrong. The model is then
            as before.
    """
    check_flag_names(flags, ["copy"])
    check_not_wrapped(module_inside(model))
    if is_exported(model):
        from .export.stock import from_stock  # only here: it needs more libraries than a model does

        return change_scheme(from_stock(model), position_scheme, **flags)
    given = copying.deepcopy(model) if copy else model
    change_scheme(model_inside(given), position_scheme, **flags)
    return given
