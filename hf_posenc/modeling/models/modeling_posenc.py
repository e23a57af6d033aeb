"""What models with a position scheme share in all families: the encoder that knows positions, and how an original model becomes one."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput, logging

from ..attention.backends import BACKENDS
from ..attention.cached_positions import append_positions, cache_lengths, check_keeps_all, keeps_positions
from ..attention.window import BACKENDS as WINDOW_BACKENDS
from ..attention.window import reach_of, window_settings
from ..extras import EXTRAS
from ..masks import is_tensor
from ..schemes.base import AttentionScheme, EmbeddingScheme
from ..schemes.flags import GLOBAL_BASE, GLOBAL_EVERY, GLOBAL_SCHEME, NEWEST_TABLE, TABLE_VERSION, UNPAD, WINDOW
from ..schemes.parameters import (
    Constant,
    PositionFrequencies,
    PositionLayerNorm,
    PositionLinear,
    PositionParameter,
    PositionTable,
    without_bias,
    zeros,
)
from ..schemes.per_sample import refuse_measured
from ..schemes.positions import Positions
from ..schemes.table import (
    FLAGS,
    SCHEMES,
    all_names,
    build_global_schemes,
    build_schemes,
    global_names,
    has_base,
    scheme_names,
)
from ..stock_interface import (
    ModelInputs,
    Receives,
    asks_for_pooler,
    check_adapter_positions,
    stock_forward,
    tells_versions,
)
from ..torch_state import is_traced
from .configuration_posenc import flags_in_use, stored_flags, version_beside_weights
from .family import Family
from .losses import answers_over_all, averaged_over_all, label_names, mean_over_all, number_of_labels
from .self_attention import EMBEDDINGS, ENCODER, ModuleReference


logger = logging.get_logger(__name__)


class PositionLayer:
    """Mixin over a family's original layer: adds the embedding-level positions to its input (`position_every_layer`).

    The layer does so itself because its scale is its own: under FSDP, or offloaded, it has its parameters only while it
    is called. It looks the positions up itself, too: a differentiable tensor handed on as a keyword would break reentrant
    gradient checkpointing. The first layer's input has the positions already, and the one that was built as the first has no
    scale, wherever it is put.
    """

    def install(self, weight: float) -> None:
        self.position_scale = PositionParameter((1,), Constant(float(weight)))

    def with_positions(self, hidden_states: torch.Tensor, repeated: "RepeatedPositions | None") -> torch.Tensor:
        """The layer's input and, but for the first layer, the positions at its own scale."""
        if repeated is not None and hasattr(self, "position_scale") and self is not repeated.first_layer.module:
            hidden_states = hidden_states + self.position_scale() * repeated.vectors(hidden_states)
        return hidden_states

    def forward(
        self, hidden_states: torch.Tensor, *args, repeated_positions: "RepeatedPositions | None" = None, **kwargs
    ) -> torch.Tensor:
        return super().forward(self.with_positions(hidden_states, repeated_positions), *args, **kwargs)


@dataclass(frozen=True)
class RepeatedPositions:
    """The embedding-level positions of a forward pass, for the layers that add them to their input.

    Attributes:
        base_model: has the embeddings.
        first_layer: of the encoder, which has the positions in its input.
        position_ids: (batch or 1, length), or None.
        length, past_length: of the sequences, and of those in the cache before.
        packing: which tokens are computed, a `Packing` of hf_posenc; None for all.
    """

    base_model: ModuleReference
    first_layer: ModuleReference
    position_ids: torch.Tensor | None
    length: int
    past_length: int | torch.Tensor
    packing: Any

    def vectors(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(batch or 1, length, hidden) for the states that these are added to, or (1, tokens, hidden)."""
        where = self.position_ids, self.length, self.past_length, hidden_states.device
        vectors = self.base_model.module.position_vectors(*where).to(hidden_states.device)
        return vectors if self.packing is None else self.packing.unpad_input(vectors)


class PositionEncoder:
    """Mixin over a family's original encoder: works the positions out once, and hands them to the layers.

    Parameters that layers share live here. The layers get integers, constants, this encoder and the embeddings as the
    keyword `position_state`, and compute from shared parameters themselves: a differentiable tensor handed on as a keyword
    would break reentrant gradient checkpointing. Modules are handed down with each call and never kept: kept, they would be
    another model's once a layer is copied into one, and old ones once their owner gets others.

    Attributes:
        position_schemes: the attention-level schemes of all layers, in the order of `position_scheme`, and last those of global layers alone.
        family: the family's description.
        receives: how the original encoder is called.
        every_layer: the embedding-level positions are added before every layer but the first.
        first_position: the family's first position id.
        is_causal: queries do not see what follows them.
        window: the options of [`window`], by which its self-attentions were made.
    """

    family: ClassVar[Family]
    receives: ClassVar[Receives]
    position_schemes: tuple[AttentionScheme, ...]
    every_layer: bool
    first_position: int
    is_causal: bool
    window: dict[str, Any]

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "receives" not in vars(cls):
            cls.receives = Receives.of(stock_forward(cls))

    def install(self, config, schemes: tuple[AttentionScheme, ...], every_layer: bool) -> None:
        """Register the parameters that layers share."""
        self.position_schemes = schemes
        self.every_layer = every_layer
        self.first_position = config.sizes.first_position
        self.is_causal = config.sizes.is_decoder
        self.window = window_settings(config)
        for scheme in schemes:
            if scheme.is_global:
                continue  # what layers share, its namesake has registered
            with EXTRAS.nothing_replaced(scheme, self):
                scheme.add_encoder_parameters(self, config)

    @property
    def reads_table(self) -> bool:
        """Whether a scheme inside the attention reads the table of absolute positions."""
        return any(scheme.reads_table for scheme in self.position_schemes)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args,
        given_mask: Any = None,
        given_position_ids: torch.Tensor | None = None,
        table_position_ids: torch.Tensor | None = None,
        base_model: ModuleReference | None = None,
        packing: Any = None,
        **kwargs,
    ) -> ModelOutput:
        """The original encoder's, on states that are packed where there is a `packing`.

        Args:
            given_mask: as the caller of the model gave it, from which Transformers made the mask of pairs that the encoder gets.
            given_position_ids: as the caller of the model gave them; some original encoders get `position_ids` too.
        """
        mask, cache, _ = self.receives.mask_and_cache(args, kwargs)
        mask = mask if given_mask is None else given_mask
        position_ids = kwargs.get("position_ids") if given_position_ids is None else given_position_ids
        where = cache, mask, position_ids, table_position_ids
        hidden_states, own = self.prepare(hidden_states, *where, base_model, packing)
        output = super().forward(hidden_states, *args, **kwargs, **own)
        if "packing" in own:
            output.last_hidden_state = own["packing"].pad_input(output.last_hidden_state)
        return output

    def prepare(
        self,
        hidden_states: torch.Tensor,
        cache: Cache | None,
        mask: Any,
        position_ids: torch.Tensor | None,
        table_position_ids: torch.Tensor | None,
        base_model: ModuleReference | None,
        packing: Any,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The input of the first layer, packed where there is a packing, and the keywords that the layers want."""
        if base_model is None and (self.every_layer or self.reads_table):
            raise ValueError("this encoder's schemes read the embeddings of its model: call the model")
        if packing is not None and hidden_states.shape[:2] != packing.shape:
            packing = None  # one sequence at several positions
        own: dict[str, Any] = {} if packing is None else {"packing": packing}
        refuse_measured(self, None if base_model is None else base_model.module)
        if self.position_schemes:
            embeddings = self.family.embeddings_of(base_model.module) if self.reads_table else None
            own["position_state"] = self._position_state(
                hidden_states, cache, mask, position_ids, table_position_ids, embeddings
            )
        if self.every_layer:
            uses_table = self.family.embeddings_of(base_model.module).position_scheme.uses_table
            own["repeated_positions"] = RepeatedPositions(
                base_model,
                ModuleReference(self.family.layers_of(self)[0]),
                table_position_ids if uses_table and table_position_ids is not None else position_ids,
                length := hidden_states.shape[1],
                cache_lengths(cache, length)[0],
                packing,
            )
        self._refuse_replicas_that_stop(base_model, own.get("repeated_positions"), hidden_states)
        return hidden_states if packing is None else packing.unpad_input(hidden_states), own

    def _refuse_replicas_that_stop(
        self, base_model: ModuleReference | None, repeated: "RepeatedPositions | None", hidden_states: torch.Tensor
    ) -> None:
        """Raise ValueError where DDP would stop in the backward pass, at a parameter that several layers are checkpointed with.

        In reentrant checkpointing each layer has a backward pass of its own, and DDP counts the gradients of a parameter.
        """
        replicas = getattr(DistributedDataParallel, "_active_ddp_module", None)
        layers = self.family.layers_of(self)
        if replicas is None or replicas.static_graph or not any(map(_is_checkpointed_reentrantly, layers)):
            return
        several = len(layers) > 1
        shared = [part for part in self.children() if several and part is not layers]
        if self.reads_table:
            embeddings = self.family.embeddings_of(base_model.module)
            joins_words = embeddings.position_scheme is not None and embeddings.position_scheme.uses_table
            shared += [embeddings.table] if several or joins_words else []
        trained = {id(p) for part in shared for p in part.parameters() if p.requires_grad}
        found = [name for name, parameter in replicas.module.named_parameters() if id(parameter) in trained]
        if repeated is not None and repeated.vectors(hidden_states).requires_grad:
            found.append("the positions that are added before every layer")
        if found:
            more = f" and {len(found) - 2} more" if len(found) > 3 else ""
            raise ValueError(
                f"{', '.join(found[: 2 if more else 3])}{more}: several layers share this, and DistributedDataParallel stops where "
                "they are checkpointed with use_reentrant=True. Give use_reentrant=False (in gradient_checkpointing_kwargs of "
                "gradient_checkpointing_enable or TrainingArguments), or static_graph=True to DistributedDataParallel"
            )

    def _position_state(
        self, hidden_states, cache, mask, position_ids, table_position_ids, embeddings: nn.Module | None
    ) -> dict:
        """By each scheme's key, the positions and what it wants once per forward; this encoder and the embeddings."""
        if embeddings is None:
            table_position_ids = None
        positions, table_positions = self._positions(hidden_states, cache, mask, position_ids, table_position_ids)
        if embeddings is not None:
            given = position_ids if table_position_ids is None else table_position_ids
            embeddings.check_length(hidden_states.shape[1], positions.offset, given)
        state = {ENCODER: ModuleReference(self), EMBEDDINGS: ModuleReference(embeddings)}
        for scheme in self.position_schemes:
            own = table_positions if scheme.reads_table else positions
            state[scheme.key] = own, scheme.prepare(own, hidden_states.dtype)
        return state

    def _positions(self, hidden_states, cache, mask, position_ids, table_position_ids) -> tuple[Positions, Positions]:
        """Where queries and keys are: as the caller counts, and as the table of absolute positions does.

        Without positions of the caller's, a token's is its index; RoBERTa-like families count non-padding tokens for their table.
        """
        (batch, length, _), device, first = hidden_states.shape, hidden_states.device, self.first_position
        past_length, key_length = cache_lengths(cache, length)
        reads_keys = any(scheme.reads_key_positions for scheme in self.position_schemes)
        if cache is not None and reads_keys:
            check_keeps_all(cache)
        query = torch.arange(length, device=device)[None] + past_length + first
        if position_ids is None and table_position_ids is None and not keeps_positions(cache):
            key = torch.arange(key_length, device=device)[None] + first
            if cache is not None:
                # The empty slots of a static cache have a position that a table has.
                key = torch.minimum(key, query[:, -1:])
            positions = Positions(query, key, past_length, True, first, mask, self.is_causal)
            return positions, positions

        if position_ids is not None:
            query = _checked(position_ids, batch, length).to(device, torch.long)
        table_query = query if table_position_ids is None else table_position_ids.to(device, torch.long)
        queries = torch.stack(torch.broadcast_tensors(query, table_query), dim=1)  # (batch or 1, 2, length)
        keys = queries
        if cache is not None and reads_keys:
            queries = queries.expand(batch, -1, -1)
            keys = append_positions(cache, queries, past_length, key_length, first)
        return tuple(
            Positions(
                queries[:, kind],
                keys[:, kind],
                past_length,
                _follow_each_other(keys[:, kind], past_length + length),
                first,
                mask,
                self.is_causal,
            )
            for kind in range(2)
        )


def _is_checkpointed_reentrantly(layer: nn.Module) -> bool:
    settings = getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
    is_checkpointed = getattr(layer, "gradient_checkpointing", False) and layer.training and torch.is_grad_enabled()
    return is_checkpointed and bool(settings.get("use_reentrant"))


def _checked(position_ids: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Position ids as (batch or 1, length).

    Raises:
        ValueError: they are of other sequences. Where nothing is looked up in a table, nothing else would notice.
    """
    given = position_ids[None] if position_ids.dim() == 1 else position_ids
    if given.dim() != 2 or given.shape[1] != length or given.shape[0] not in (1, batch):
        raise ValueError(
            f"position_ids have the shape {tuple(position_ids.shape)} for {batch} sequences of {length} tokens: give "
            f"({batch}, {length}) or (1, {length})"
        )
    return given


def _follow_each_other(positions: torch.Tensor, length: int | torch.Tensor) -> bool:
    """Whether the first `length` of (batch or 1, keys) are consecutive; only told where looking costs next to nothing."""
    if positions.device.type != "cpu" or is_traced():
        return False
    positions = positions[:, : int(length)]
    return torch.equal(positions[:, 1:], positions[:, :-1] + 1)


class PositionModel:
    """Mixin over a family's base model: hands itself to its encoder, which reads tables that belong to the embeddings.

    Its forward is Transformers', by [`hands_positions_on`]. In RoBERTa-like families, positions in the table count the
    tokens that are not padding, so they need the input. The embeddings work them out themselves; here they are worked
    out for what reads the table inside the encoder.

    Attributes:
        unpad_is_requested: `hf_posenc.unpad` asked to skip padding, on CUDA too.
    """

    unpad_is_requested: bool = False

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        # A class that derives from a model with a position scheme has its forward, or one of its own that calls it.
        if cls.forward is stock_forward(cls):
            cls.forward = hands_positions_on(cls.forward)

    def for_the_encoder(self, inputs: ModelInputs) -> dict[str, Any]:
        """What the encoder is given in addition to Transformers' arguments."""
        given: dict[str, Any] = {"given_mask": inputs.attention_mask, "given_position_ids": inputs.position_ids}
        embeddings, encoder = self.family.embeddings_of(self), self.family.encoder_of(self)
        scheme = embeddings.position_scheme
        repeats_table = encoder.every_layer and scheme is not None and scheme.uses_table
        if encoder.reads_table or encoder.every_layer:
            given["base_model"] = ModuleReference(self)
            if inputs.position_ids is None and (encoder.reads_table or repeats_table):
                past_length = 0 if inputs.cache is None else inputs.cache.get_seq_length()
                given["table_position_ids"] = embeddings.family_position_ids(inputs.input_ids, past_length)
        if self.config.unpad:
            heads = self.family.setting(self.config, "num_attention_heads")
            given["packing"] = EXTRAS.packing_of(self.config, encoder, heads, inputs, self.unpad_is_requested)
        return {name: value for name, value in given.items() if value is not None}

    def position_ids_of(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Position ids as the caller gave them. Where a stride needs to know which embeddings are padding: indices, the first at padding."""
        embeddings, mask = self.family.embeddings_of(self), inputs.attention_mask
        scheme = embeddings.position_scheme
        has_stride = scheme is not None and scheme.uses_table and scheme.stride > 1
        is_told = inputs.input_ids is not None or inputs.position_ids is not None
        if not has_stride or is_told or not is_tensor(mask) or tuple(mask.shape) != inputs.shape:
            return inputs.position_ids
        places = torch.arange(mask.shape[1], device=mask.device)[None]
        return places.where(mask.bool(), 0) + embeddings.first_position

    def position_vectors(
        self, position_ids: torch.Tensor | None, length: int, past_length: int | torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        """The embedding-level vectors in the width of the layers (ELECTRA projects them, without its bias)."""
        vectors = self.family.embeddings_of(self).position_vectors(position_ids, length, past_length, device)
        # ELECTRA has none where both are of one width.
        projection = getattr(self, self.family.projection, None) if self.family.projection else None
        return vectors if projection is None else without_bias(projection, vectors)

    @property
    def family(self) -> Family:
        return self.position_classes.family


def hands_positions_on(forward: Callable) -> Callable:
    """An original base model's forward that tells the encoder where tokens are."""
    receives = Receives.of(forward)

    @functools.wraps(forward)
    def forward_with_positions(self, *args, **kwargs):
        inputs = ModelInputs.of(receives, args, kwargs)
        own, position_ids = self.for_the_encoder(inputs), self.position_ids_of(inputs)
        if position_ids is not inputs.position_ids:
            args, kwargs = (), {**inputs.arguments, "position_ids": position_ids}
        return forward(self, *args, **kwargs, **own)

    return tells_versions(forward_with_positions)


@dataclass(frozen=True)
class FamilyClasses:
    """A family's description, the classes that its original modules turn into, and its original eager attention function."""

    family: Family
    embeddings: type
    encoder: type
    layer: type
    self_attention: type
    model: type
    eager: object


def become(module: nn.Module, cls: type[nn.Module]) -> None:
    """Turn an original module into the class with a position scheme, in place.

    Raises:
        ValueError: the module is not of a class that `cls` derives from. Somebody has replaced the original class, and what the
            other one does would be lost.
    """
    found = type(module)
    if not issubclass(cls, found):
        stock = next(c for c in cls.__mro__ if c.__module__.startswith("transformers."))
        raise ValueError(
            f"position_scheme needs a {stock.__module__}.{stock.__name__} and the model has a {found.__module__}."
            f"{found.__qualname__} instead, which {cls.__name__} would overwrite: restore the original class before the "
            "model is built, or build it without position_scheme"
        )
    module.__class__ = cls


def install_positions(model: nn.Module, parts: FamilyClasses) -> None:
    """Turn an original base model into a model with a position scheme, in place, as its config says.

    The modules change their class and keep their parameters, as modules do under FSDP2's `fully_shard`: nothing is
    built twice, and checkpoint keys stay what they are.
    """
    config, family = model.config, parts.family
    embeddings, encoder = family.embeddings_of(model), family.encoder_of(model)
    if hasattr(encoder, "position_schemes"):
        return
    embedding_scheme, of_local = build_schemes(config)
    of_global = build_global_schemes(config, of_local)
    schemes = _each_once(of_local, of_global)
    trained = config.trained_schemes
    uses_table = embedding_scheme is not None and embedding_scheme.uses_table
    reads_table = any(scheme.reads_table for scheme in schemes)

    if not isinstance(model, parts.model):
        become(model, parts.model)
    # Unlike Transformers' these leave the embeddings out. The encoder may read their table, which as a unit of FSDP they would
    # have given up by then; and accelerate makes the word embeddings a unit, which fails within another.
    model._no_split_modules = set(parts.model._no_split_modules or ())
    become(embeddings, parts.embeddings)
    embeddings.install(config, embedding_scheme, uses_table or reads_table)
    if uses_table:
        # Added to a model that was trained without one, the table too starts at zero. (Where tupe reads it as well, it
        # cannot: a LayerNorm has no use for zeros.)
        if not reads_table and not any(SCHEMES[name].uses_table or SCHEMES[name].reads_table for name in trained):
            embeddings.table.position_initial = {"weight": zeros}
    become(encoder, parts.encoder)
    every_layer = embedding_scheme is not None and embedding_scheme.every_layer
    encoder.install(config, schemes, every_layer)
    if every_layer:
        for index, layer in enumerate(family.layers_of(encoder)):
            become(layer, parts.layer)
            if index:
                layer.install(embedding_scheme.every_layer_weight)
        # Of the original class, or of one above it, there is none any more.
        model._no_split_modules -= {base.__name__ for base in parts.layer.__mro__}
        model._no_split_modules.add(parts.layer.__name__)
    for index, layer in enumerate(family.layers_of(encoder)):
        attention = family.self_attention_of(layer)
        become(attention, parts.self_attention)
        attention.install(config, index, of_global if reach_of(config, index) is None else of_local, parts.eager)


def _each_once(*schemes: tuple[AttentionScheme, ...]) -> tuple[AttentionScheme, ...]:
    """The scheme objects of local and of global layers, those of both once."""
    return tuple(dict.fromkeys(scheme for some in schemes for scheme in some))


def check_built_as_configured(model: nn.Module) -> None:
    """Raise ValueError where the position options of a config with a position scheme are no longer those that it was built with."""
    config, family = model.config, model.position_classes.family
    embeddings, encoder = family.embeddings_of(model.base_model), family.encoder_of(model.base_model)
    embedding_scheme, of_local = build_schemes(config)
    schemes = _each_once(of_local, build_global_schemes(config, of_local))
    built = [scheme for scheme in (embeddings.position_scheme, *encoder.position_schemes) if scheme]
    configured = [scheme for scheme in (embedding_scheme, *schemes) if scheme]
    if {scheme.name for scheme in built} != {scheme.name for scheme in configured}:
        was, is_now = ("+".join(scheme.name for scheme in some) or "none" for some in (built, configured))
        changed = [("position_scheme", was, is_now)]
    else:
        changed = [("the first position", encoder.first_position, config.sizes.first_position)]
        changed += [(flag, was, window_settings(config)[flag]) for flag, was in encoder.window.items()]
        for old in built:
            new = next((scheme for scheme in configured if scheme.key == old.key), old)  # terms add up in any order
            if type(old) is not type(new):
                raise ValueError(
                    f"position_scheme {old.name!r} was registered again after the model was built, which computes with the class before: "
                    "the new file would be saved with these weights. Register the file as it was to save them, or load the "
                    "checkpoint again"
                )
            flags = {flag.attribute for flag in old.flags}
            for name in vars(old) | vars(new):
                what = f"position_{name}" if name in flags else f"{old.name}'s {name}"
                changed.append((what, _plain(vars(old).get(name)), _plain(vars(new).get(name))))
    told = [f"{what} was {old!r} and is {new!r}" for what, old, new in changed if old != new]
    if told:
        raise ValueError(
            f"the config was changed after the model was built ({'; '.join(told)}), and these weights do not belong to it: "
            "set it back, or load the checkpoint again with the options that you want"
        )


def _plain(value: Any) -> Any:
    """A list and a tuple of the same things are the same option."""
    return list(value) if isinstance(value, tuple) else value


class PosencPreTrainedModel:
    """Mixin over the original classes of a family: base model and heads.

    Attributes:
        position_classes: the family's classes.
        stock_loss_divides: the original head computes its loss by `loss_function`, which divides by `num_items_in_batch`.
    """

    position_classes: FamilyClasses
    stock_loss_divides: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        inherits = any(
            issubclass(base, PosencPreTrainedModel) and hasattr(base, "forward") for base in cls.__mro__[1:]
        )
        # A class that derives from one with a position scheme has its forward, or hands `num_items_in_batch` on to it.
        if hasattr(cls, "forward") and not inherits and label_names(cls.forward):
            forward = cls.forward if cls.stock_loss_divides else averaged_over_all(cls.forward)
            cls.forward = EXTRAS.computes_padding_that_is_read(asks_for_pooler(forward))

    def __init__(self, config, *args, **kwargs):
        # Options given with a config arrive here, from `from_pretrained(..., config=config, position_scheme=...)`.
        flags = {flag: kwargs.pop(flag) for flag in (*FLAGS, UNPAD.name, TABLE_VERSION) if flag in kwargs}
        super().__init__(self.config_class.adopt(config, **flags), *args, **kwargs)
        # A head has built its original base model by now (or, where the plugin is installed, the model with a position scheme).
        install_positions(self.base_model, self.position_classes)
        if any(isinstance(module, PositionFrequencies) for module in self.modules()):
            self._keep_in_fp32_modules_strict = {"rotary_frequencies"}
        self.post_init()

    def loss_over_all(self, values: tuple, arguments: dict, number: torch.Tensor) -> torch.Tensor:
        """The original loss as a sum over own labels, divided by `num_items_in_batch`.

        Args:
            values: what the original forward returned, the loss first.
            arguments: what it was given, by name.
            number: `num_items_in_batch`.
        """
        if "start_positions" in arguments:
            return answers_over_all(*values[1:3], arguments["start_positions"], arguments["end_positions"], number)
        return mean_over_all(values[0], number_of_labels(arguments["labels"]), number)

    def _init_stock_weights(self, module: nn.Module) -> None:
        """As Transformers initialises; a family overrides it where Transformers needs a part that may be missing here."""
        super()._init_weights(module)

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, (PositionTable, PositionLinear, PositionLayerNorm, PositionParameter)):
            self._init_stock_weights(module)
        for name, initial in getattr(module, "position_initial", {}).items():
            with torch.no_grad():
                initial(getattr(module, name))

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As in transformers, under the names of the model's own parameters.

        By default, transformers goes back to a checkpoint's older names (`gamma` and `beta` of a LayerNorm; up to 5.5, to these
        whatever the checkpoint has), which a Trainer that resumes a run does not know.

        Raises:
            ValueError: the config's options are not those that the model was built with. Its weights would be saved with
                another scheme's name.
        """
        check_built_as_configured(self)
        kwargs.setdefault("save_original_format", False)
        super().save_pretrained(save_directory, *args, **kwargs)

    def load_adapter(self, *args, **kwargs):
        """As in transformers.

        Raises:
            ImportError: the adapter brings positions, and this transformers drops them.
        """
        known = {*getattr(self, "peft_config", ())}
        info = super().load_adapter(*args, **kwargs)
        check_adapter_positions(self, known)
        return info

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs) -> torch.Tensor:
        """As in transformers, but from the family's first position: `generate` counts from 0 in every family.

        What computes what Transformers computes, without other options, keeps Transformers' count.
        """
        position_ids = super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        family = self.config.family
        is_native = stored_flags(vars(self.config)) == {"position_scheme": family.native_scheme}
        # As it was built: the padding id of a config may be changed for `generate`.
        return position_ids + (0 if is_native else family.encoder_of(self.base_model).first_position)

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        """Refuse a backend that does not support the schemes, before transformers looks whether it is installed."""
        schemes = [scheme for scheme in self.config.schemes.values() if issubclass(scheme, AttentionScheme)]
        # A name that nobody knows is transformers' to refuse; one with a slash is a kernel on the Hub.
        if attn_implementation in ALL_ATTENTION_FUNCTIONS.valid_keys() or "/" in str(attn_implementation):
            if window_settings(self.config)[WINDOW.name] and attn_implementation not in WINDOW_BACKENDS:
                raise ValueError(
                    f"attn_implementation={attn_implementation!r} does not support {WINDOW.name}={self.config.position_window}; "
                    f"these do: {', '.join(WINDOW_BACKENDS)}"
                )
            for scheme in schemes:
                if not _carries(scheme, attn_implementation):
                    _refuse(scheme, attn_implementation)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def _adjust_missing_and_unexpected_keys(self, loading_info) -> None:
        """Say in a sentence each what the schemes leave out of the checkpoint, and what cannot start output-preserving.

        transformers' report of what it loaded, which comes next, then lists neither the table that was left out nor the
        parameters of schemes that the checkpoint never had.
        """
        super()._adjust_missing_and_unexpected_keys(loading_info)
        read_table_as(self, version_beside_weights(self.config))
        known = self.report_positions(loading_info.missing_keys, loading_info.unexpected_keys)
        loading_info.unexpected_keys = loading_info.unexpected_keys - known
        loading_info.missing_keys = loading_info.missing_keys - self._new_positions(loading_info.missing_keys)

    def report_positions(self, missing_keys: set[str], unexpected_keys: set[str]) -> set[str]:
        """Log what the schemes leave out of the checkpoint, and what cannot start output-preserving.

        Args:
            missing_keys: names of the model's parameters that are new.
            unexpected_keys: names of parameters, of what it is made of, that it has no use for.

        Returns:
            Those among `unexpected_keys` that are parameters of the family's own positions.

        Raises:
            ValueError: a table for all layers would be left out for tables by layer.
        """
        name = self.config.position_scheme
        trained, family = self.config.trained_schemes, self.config.family
        embedding = family.embeddings_of(self.base_model).position_scheme
        attention = family.encoder_of(self.base_model).position_schemes
        native = scheme_names(family.native_scheme)
        keys = {"absolute": family.table_key, **family.native_keys}
        unexpected = {name: {key for key in unexpected_keys if key.endswith(end)} for name, end in keys.items()}
        kept = {*self.config.schemes}
        per_layer = {name for name in kept & trained & {*family.native_keys} if unexpected[name]}
        if per_layer:
            raise ValueError(
                f"position_scheme={name!r}: the checkpoint has one position embedding matrix for all layers for "
                f"{' and '.join(per_layer)}; load it without position_per_layer"
            )
        added = [scheme for scheme in (embedding, *attention) if scheme and scheme.name not in trained]
        new = [scheme.name for scheme in added if not scheme.starts_silent_beside(trained & kept)]
        # A scheme may read the table without adding it to the token embeddings; and transformers 4 wrote one next to its relative
        # schemes that it did not read.
        reads_table = any(scheme.reads_table for scheme in attention) and embedding is None
        lost = [n for n in native if n in trained - kept and (n in keys and unexpected[n])]
        if "absolute" in trained and reads_table:
            lost = ["absolute", *(n for n in lost if n != "absolute")]
        if lost:
            remedy = "fine-tune before use"
            # Only where the other composite computes what the checkpoint does: nothing else new, nothing else taken away.
            others_stay = trained <= {*lost, *kept}
            joins_words = embedding is None or embedding.uses_table
            silent = all(scheme.starts_silent_beside(trained) for scheme in added)
            if (attention or embedding) and joins_words and others_stay and silent:
                whole = [n for n in native if n in (*lost, *kept)]
                whole += [s.name for s in attention if s.name not in whole]
                remedy += f", or keep them with position_scheme={'+'.join(whole)!r}"
            logger.warning_once(
                f"position_scheme={name!r} leaves out the {' and '.join(lost)} positions that this checkpoint was trained with: "
                f"{remedy}."
            )
        if embedding and embedding.uses_table and embedding.name not in trained:
            # A table that the checkpoint lacks starts at zero; one that lay there unread does not.
            missing = any(key.endswith(family.table_key) for key in missing_keys)
            if not missing or any(scheme.reads_table for scheme in attention):
                new.append(embedding.name)
        self._warn_of_new(new)
        _warn_of_embedding_options(self.config, embedding)
        _warn_of_new_window(self.config)
        _warn_of_other_global_layers(self.config)
        return set().union(*unexpected.values())

    def _warn_of_new(self, schemes: list[str]) -> None:
        """Log a warning where schemes, by their names, are new to the checkpoint and cannot start output-preserving."""
        if schemes:
            reason = " with position_init='paper'" if self.config.position_init == "paper" else ""
            logger.warning_once(
                f"position_scheme={self.config.position_scheme!r}: {' and '.join(schemes)} cannot start output-preserving{reason}; the "
                "model computes something else than its checkpoint until it is fine-tuned."
            )

    def _new_positions(self, missing: set[str]) -> set[str]:
        """The missing keys of schemes that the checkpoint never had. They are initialised, as transformers does before.

        What the checkpoint should have and lacks is damage, and not among them. The config saved with the weights tells, which
        may be another than the model's; where there is none, nothing is new.
        """
        config = self.config
        positions = {key for key in missing if self._is_position(key)}
        stored = config.flags_beside_weights() if positions else None
        if stored is None:
            return set()
        # The same model without what is new: as much as that should have been in the checkpoint.
        was = stored.get("position_scheme") or config.family.native_scheme
        trained = {*all_names(was, stored.get(GLOBAL_SCHEME.name))}
        kept, kept_in_global = (
            "+".join(name for name in names if name in trained) or "none"
            for names in (
                scheme_names(config.position_scheme),
                global_names(config.position_scheme, config.position_global_scheme),
            )
        )
        if not stored and {kept, kept_in_global} <= {"absolute", "none"}:
            return positions
        # How parameters start says nothing of which there are, and may have no use with what is kept (rope).
        flags = flags_in_use(kept, kept_in_global) - {GLOBAL_BASE.name, "position_init"}
        if stored.get("position_combine", "add") == "add":
            flags -= {"position_combine", "position_width"}
        if not stored.get("position_every_layer"):
            flags -= {"position_every_layer", "position_every_layer_weight"}
        config = copy.deepcopy(config)
        vars(config).update(
            {flag: getattr(config, flag) if flag in flags else None for flag in FLAGS}, position_scheme=kept
        )
        if config.position_global_scheme is not None:
            config.position_global_scheme = kept_in_global
        with torch.device("meta"):
            model = self.position_classes.model(config)
        prefix = "" if self.base_model is self else f"{self.base_model_prefix}."
        return positions - {prefix + key for key in model.state_dict()}

    def _is_position(self, key: str) -> bool:
        """Whether a parameter, by its name, belongs to a scheme."""
        module, _, name = key.rpartition(".")
        return name in vars(self.get_submodule(module)).get("position_initial", {})


def _warn_of_embedding_options(config, embedding: EmbeddingScheme | None) -> None:
    """Log a warning where the vectors of positions that a checkpoint has reach its layers in a new way, which changes outputs.

    And one where an option is about a number that the checkpoint has among its weights.
    """
    if embedding is None or embedding.name not in config.trained_schemes:
        return
    stored, given = config._stored_flags, stored_flags(vars(config))
    new = {"position_width": embedding.width} if embedding.width != (stored.get("position_width") or 0) else {}
    kept = ["position_amplitude"]
    if stored.get("position_every_layer"):
        kept.append("position_every_layer_weight")
    elif embedding.every_layer_weight:
        new["position_every_layer_weight"] = embedding.every_layer_weight
    if new:
        logger.warning_once(
            f"{' and '.join(f'{flag}={value}' for flag, value in new.items())}: the model computes something else than its "
            "checkpoint until it is fine-tuned."
        )
    for flag in kept:
        if flag in given and given[flag] != stored.get(flag):
            logger.warning_once(
                f"{flag}={given[flag]}: the checkpoint has its own value among its weights, which is kept. To change it, set the "
                "weight of position_scale."
            )


def _warn_of_new_window(config) -> None:
    """Say so where layers see less than those of the checkpoint."""
    settings = window_settings(config)
    stored = window_settings(SimpleNamespace(**config._stored_flags))
    if settings[WINDOW.name] and any(settings[flag.name] != stored[flag.name] for flag in (WINDOW, GLOBAL_EVERY)):
        logger.warning_once(
            f"{WINDOW.name}={settings[WINDOW.name]}: its layers, except the global ones, attend to no key more than "
            f"{settings[WINDOW.name] // 2} tokens away; on longer texts the model computes something else than its checkpoint until "
            "it is fine-tuned."
        )


def _warn_of_other_global_layers(config) -> None:
    """Say so where the layers of one kind lose a scheme that the other kind keeps, or global layers get another base."""
    stored, base = config._stored_flags, getattr(config, GLOBAL_BASE.name, None)
    was = stored.get("position_scheme") or config.family.native_scheme, stored.get(GLOBAL_SCHEME.name)
    trained = global_names(was[0], None), global_names(*was)
    now = config.position_scheme, config.position_global_scheme
    kept = global_names(now[0], None), global_names(*now)
    changed = {name for old, new in zip(trained, kept) for name in old if name not in new and name in config.schemes}
    if base != stored.get(GLOBAL_BASE.name):
        changed |= {name for name in trained[1] if name in kept[1] and has_base(SCHEMES[name])}
    if changed:
        logger.warning_once(
            f"{GLOBAL_SCHEME.name}={config.position_global_scheme!r}, {GLOBAL_BASE.name}={base!r}: the checkpoint "
            f"was trained with {' and '.join(sorted(changed))} in other layers, or with another base; the model computes something else "
            "until it is fine-tuned."
        )


def read_table_as(model: nn.Module, version: int) -> None:
    """Read the table of a model, if it has one with buckets, as the model does that its weights are from.

    Args:
        model: a base model with positions, or a head of one.
        version: as `position_table_version` has it.
    """
    if version == (model.config.position_table_version or NEWEST_TABLE):
        return
    model.config.position_table_version = version
    for module in model.modules():
        for part in (module, *vars(module).get("position_schemes", ())):
            if vars(part).get("table_version") is not None:
                part.table_version = version


def _carries(scheme: type[AttentionScheme], implementation: str) -> bool:
    """Whether a backend, by its name in the config, supports a scheme."""
    return not scheme.adds_scores or implementation in _backends(scheme)


def _backends(scheme: type[AttentionScheme]) -> list[str]:
    return [name for name in scheme.backends if name != "flex_attention" or name in BACKENDS]


def _refuse(scheme: type[AttentionScheme], implementation: str) -> None:
    needs_package = implementation in scheme.backends
    more = (
        "; with hf_posenc installed, and imported before the model is loaded, all backends do" if needs_package else ""
    )
    raise ValueError(
        f"attn_implementation={implementation!r} does not support position_scheme={scheme.name!r}; these do: "
        f"{', '.join(_backends(scheme))}{more}"
    )
