"""What the variants of all families share: the encoder that knows where tokens are, and how a stock model becomes one."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, logging

from .attention import ENCODER, InHand
from .configuration_posenc import FLAGS, flags_in_use
from .scheme import (
    AttentionScheme,
    PositionEmbedding,
    PositionLayerNorm,
    PositionLinear,
    Positions,
    add_parameter,
    without_bias,
    zeros,
)
from .schemes import ALIASES, build_schemes, scheme_names


logger = logging.get_logger(__name__)

TABLE_KEY = "embeddings.position_embeddings.weight"


class PositionLayer:
    """Mixin over a family's stock layer: adds the embedding-level positions to its input (`position_every_layer`).

    The layer does so itself because its scale is its own: under FSDP, or offloaded, it has its parameters only while it
    is called.
    """

    def install(self) -> None:
        add_parameter(self, "position_scale", (1,), zeros)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None,
        positions: torch.Tensor,
        **kwargs,
    ) -> torch.Tensor:
        hidden_states = hidden_states + self.position_scale * positions
        return super().forward(hidden_states, attention_mask, encoder_hidden_states, **kwargs)


class PositionEncoder:
    """Mixin over a family's stock encoder: works the positions out once, and hands them to the layers.

    Parameters that layers share live here. The layers get integers, constants and this encoder as the keyword
    `position_state`, and compute from shared parameters themselves: a differentiable tensor handed on as a keyword would
    break reentrant gradient checkpointing. An encoder that a layer kept would be another model's once the layer is copied
    into one.
    """

    position_schemes: tuple[AttentionScheme, ...]
    every_layer: bool

    def install(self, config, schemes, embeddings: nn.Module, projection: nn.Module | None, every_layer: bool) -> None:
        """Register shared parameters; `projection` leads from the width of the embeddings to that of the layers."""
        self.position_schemes = schemes
        self.every_layer = every_layer
        # In a tuple: neither is the encoder's child.
        self._embeddings = (embeddings, projection)
        for scheme in schemes:
            scheme.add_encoder_parameters(self, config)

    @property
    def position_embeddings(self) -> nn.Module:
        """The embeddings module, which holds the table of absolute positions."""
        return self._embeddings[0]

    @property
    def needs_table_positions(self) -> bool:
        """Whether something inside the encoder counts positions as the table of absolute positions does."""
        scheme = self.position_embeddings.position_scheme
        repeats_table = self.every_layer and scheme is not None and scheme.name == "absolute"
        return repeats_table or any(scheme.reads_table for scheme in self.position_schemes)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        position_ids: torch.Tensor | None = None,
        table_position_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        length, device, dtype = hidden_states.shape[1], hidden_states.device, hidden_states.dtype
        past_length, key_length = _cache_lengths(past_key_values, length)
        if self.position_schemes:
            kwargs["position_state"] = self._position_state(
                position_ids, table_position_ids, length, past_length, key_length, past_key_values, dtype, device
            )
        repeated = ()
        if self.every_layer:
            ids = position_ids if table_position_ids is None else table_position_ids
            repeated = (self._repeated_positions(ids, length, past_length, device),)

        for index, layer in enumerate(self.layer):
            hidden_states = layer(
                hidden_states,
                attention_mask,
                encoder_hidden_states,  # positional, as gradient checkpointing needs it
                *(repeated if index else ()),  # likewise
                encoder_attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values if use_cache else None
        )

    def _position_state(
        self, position_ids, table_position_ids, length, past_length, key_length, cache, dtype, device
    ) -> dict:
        """What each scheme wants once per forward, by its name; and this encoder."""
        first = self.position_embeddings.first_position
        slots = torch.arange(length, device=device)[None] + past_length
        key_slots = torch.arange(key_length, device=device)[None]
        contiguous = position_ids is None or cache is not None
        query_positions = slots + first if position_ids is None else position_ids.to(device)
        key_positions = key_slots + first if contiguous else query_positions
        positions = Positions(query_positions, key_positions, past_length, contiguous, first)

        state = {ENCODER: InHand(self)}
        for scheme in self.position_schemes:
            if scheme.reads_table:
                absolute = self._table_positions(positions, position_ids, table_position_ids, cache)
                state[scheme.name] = scheme.prepare(absolute, dtype)
            else:
                state[scheme.name] = scheme.prepare(positions, dtype)
        return state

    def _table_positions(self, positions: Positions, position_ids, table_position_ids, cache) -> Positions:
        """The same positions as the table of absolute positions counts them, also those of cached keys."""
        query = position_ids if table_position_ids is None else table_position_ids
        self.position_embeddings.check_length(positions.query.shape[1], positions.offset, query)
        if query is None:
            query = positions.query
        key = query
        if cache is not None:
            # Of the tokens in the cache only their number is known: they precede the last query one by one. The slots
            # after it are a static cache's empty ones.
            last = positions.offset + positions.query.shape[1] - 1
            back = last - torch.arange(positions.key.shape[1], device=query.device)
            key = (query[:, -1:] - back).clamp(min=positions.first)
        return Positions(query, key, positions.offset, positions.contiguous, positions.first)

    def _repeated_positions(self, position_ids, length, past_length, device) -> torch.Tensor:
        """The embedding-level vectors in the width of the layers (ELECTRA projects them, without its bias)."""
        embeddings, projection = self._embeddings
        vectors = embeddings.position_vectors(position_ids, length, past_length, device)
        return vectors if projection is None else without_bias(projection, vectors)


def _cache_lengths(cache: Cache | None, length: int) -> tuple[int | torch.Tensor, int]:
    """Number of tokens in the cache, and number of keys once the current ones are in it."""
    if cache is None:
        return 0, length
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return own.get_seq_length(), own.get_mask_sizes(length, 0)[0]


@dataclass(frozen=True)
class Parts:
    """The classes that a family's stock modules turn into, and its stock eager attention function."""

    embeddings: type
    encoder: type
    layer: type
    self_attention: type
    model: type
    eager: object


def install_positions(model: nn.Module, parts: Parts) -> None:
    """Turn a stock base model into a variant, in place, as its config says.

    The modules change their class and keep their parameters, as modules do under FSDP2's `fully_shard`: nothing is
    built twice, and checkpoint keys stay what they are.
    """
    if hasattr(model.encoder, "position_schemes"):
        return
    config = model.config
    embedding_scheme, schemes = build_schemes(config)
    trained = _trained_schemes(config)
    keeps_table = any(scheme.reads_table for scheme in schemes)
    if embedding_scheme is not None and embedding_scheme.name == "absolute":
        keeps_table = True

    if not isinstance(model, parts.model):
        model.__class__ = parts.model
    # Unlike stock's these leave the embeddings out. The encoder may read their table, which as a unit of FSDP they would
    # have given up by then; and accelerate makes the word embeddings a unit, which fails within another.
    model._no_split_modules = set(parts.model._no_split_modules)
    model.embeddings.__class__ = parts.embeddings
    model.embeddings.install(config, embedding_scheme, keeps_table)
    if embedding_scheme is not None and embedding_scheme.name == "absolute":
        # Added to a variant that was trained without one, the table too starts silent. (Where tupe reads it as well, it
        # cannot: a LayerNorm has no use for zeros.)
        without_table = bool(trained) and not {"absolute", "tupe"} & trained
        if without_table and not any(scheme.reads_table for scheme in schemes):
            model.embeddings.position_embeddings.position_initial = {"weight": zeros}
    model.encoder.__class__ = parts.encoder
    projection = getattr(model, "embeddings_project", None)
    model.encoder.install(config, schemes, model.embeddings, projection, bool(config.position_every_layer))
    if config.position_every_layer:
        for layer in model.encoder.layer[1:]:
            layer.__class__ = parts.layer
            layer.install()
            model._no_split_modules.add(parts.layer.__name__)
    for layer in model.encoder.layer:
        attention = layer.attention.self
        attention.__class__ = parts.self_attention
        attention.install(config, schemes, parts.eager)


def averaged_over_all(forward: Callable) -> Callable:
    """A head's forward that understands `num_items_in_batch`: its loss is then Σ over own labels / num_items_in_batch.

    `Trainer` hands every model the number of labels in all processes and accumulated batches, and leaves it to the model
    to divide by it. These stock heads take the mean over their own labels instead, and what Trainer sees and
    trains on is too large by the number of processes and of accumulated batches.
    """

    @functools.wraps(forward)
    def averaged(self, *args, num_items_in_batch: torch.Tensor | int | None = None, **kwargs):
        output = forward(self, *args, **kwargs)
        labels = kwargs.get("labels")
        if num_items_in_batch is None or labels is None:
            return output
        share = (labels != -100).sum() / num_items_in_batch
        if isinstance(output, tuple):
            return output[0] * share, *output[1:]
        output.loss = output.loss * share
        return output

    return averaged


class PosencPreTrainedModel:
    """Mixin over the stock classes of a family: base model and heads.

    Attributes:
        position_parts: the family's classes.
    """

    position_parts: Parts

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        # Base models have no loss, and the heads that write text know how to average it.
        if not cls.__name__.endswith(("Model", "ForCausalLM")):
            cls.forward = averaged_over_all(cls.forward)

    def __init__(self, config, *args, **kwargs):
        # Flags beside a config arrive here, from `from_pretrained(..., config=config, position_scheme=...)`.
        flags = {flag: kwargs.pop(flag) for flag in FLAGS if flag in kwargs}
        super().__init__(self.config_class.adopt(config, **flags), *args, **kwargs)
        # A head has built its stock base model by now (or, where the plugin has opened that door, the variant).
        install_positions(self.base_model, self.position_parts)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, (PositionEmbedding, PositionLinear, PositionLayerNorm)):
            super()._init_weights(module)
        for name, initial in getattr(module, "position_initial", {}).items():
            with torch.no_grad():
                initial(getattr(module, name))

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs) -> torch.Tensor:
        """As in transformers, but from the family's first position: `generate` counts from 0 in every family.

        `absolute` alone computes what stock computes, and keeps stock's count.
        """
        position_ids = super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        return position_ids + (0 if self.config.position_scheme == "absolute" else self.config.first_position)

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        """Refuse a backend that cannot carry the schemes, before transformers looks whether it is installed."""
        _, schemes = build_schemes(self.config)
        # A name that nobody knows is transformers' to refuse; one with a slash is a kernel on the Hub.
        if attn_implementation in ALL_ATTENTION_FUNCTIONS.valid_keys() or "/" in str(attn_implementation):
            for scheme in schemes:
                if not _carries(scheme, attn_implementation):
                    raise ValueError(
                        f"attn_implementation={attn_implementation!r} cannot carry position_scheme={scheme.name!r}; "
                        f"these can: {', '.join(scheme.backends)}"
                    )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def _adjust_missing_and_unexpected_keys(self, loading_info) -> None:
        """Say in a sentence each what the variant takes away from the checkpoint, and what cannot start silent.

        transformers' report of what it loaded, which comes next, then lists neither the table that was left out nor the
        parameters of schemes that the checkpoint never had.
        """
        super()._adjust_missing_and_unexpected_keys(loading_info)
        name = self.config.position_scheme
        embedding, attention = build_schemes(self.config)
        trained = _trained_schemes(self.config) or {"absolute"}
        table = {key for key in loading_info.unexpected_keys if key.endswith(TABLE_KEY)}
        loading_info.unexpected_keys = loading_info.unexpected_keys - table
        new = [s.name for s in (embedding, *attention) if s and s.name not in trained and not s.starts_silent()]
        # A scheme may read the table without adding it to the words; and transformers 4 wrote one beside its relative
        # schemes that it did not read.
        kept = any(scheme.reads_table for scheme in attention) and embedding is None
        if "absolute" in trained and (table or kept):
            remedy = "fine-tune before use"
            # Only where the other composite computes what the checkpoint does: nothing else new, nothing else taken away.
            others_stay = trained <= {"absolute", *(s.name for s in attention)}
            if attention and embedding is None and others_stay and not new:
                remedy += f", or keep them with position_scheme='absolute+{'+'.join(s.name for s in attention)}'"
            logger.warning_once(
                f"position_scheme={name!r} leaves out the absolute positions that this checkpoint was trained with: {remedy}."
            )
        if embedding and embedding.name == "absolute" and "absolute" not in trained:
            # A table that the checkpoint lacks starts at zero; one that lay there unread does not.
            missing = any(key.endswith(TABLE_KEY) for key in loading_info.missing_keys)
            if not missing or any(scheme.reads_table for scheme in attention):
                new.append("absolute")
        if new:
            reason = " with position_init='reference'" if self.config.position_init == "reference" else ""
            logger.warning_once(
                f"position_scheme={name!r}: {' and '.join(new)} cannot start silent{reason}; the model computes something else "
                "than its checkpoint until it is fine-tuned."
            )
        loading_info.missing_keys = loading_info.missing_keys - self._new_positions(loading_info.missing_keys)

    def _new_positions(self, missing: set[str]) -> set[str]:
        """The missing keys of schemes that the checkpoint never had. They are initialised, as transformers does before.

        What the checkpoint should have and lacks is damage, and not among them. Nor is anything where nothing tells what the
        checkpoint had: the config was made by hand, or may have been read from another place than the weights.
        """
        config = self.config
        place, stored = config._stored_flags
        if place not in ("", config.name_or_path):  # transformers has put the place of the weights there
            return set()
        config._stored_flags = (config.name_or_path, stored)  # the config of a model may be used again, elsewhere
        positions = {key for key in missing if self._is_position(key)}
        if not positions or not stored:
            return positions
        # The same model without what is new: as much as that should have been in the checkpoint.
        trained = _trained_schemes(config)
        kept = "+".join(name for name in scheme_names(config.position_scheme) if name in trained) or "none"
        flags = flags_in_use(kept)
        if stored.get("position_combine", "add") == "add":
            flags -= {"position_combine"}
        if not stored.get("position_every_layer"):
            flags -= {"position_every_layer"}
        config = copy.deepcopy(config)
        vars(config).update(
            {flag: getattr(config, flag) if flag in flags else None for flag in FLAGS}, position_scheme=kept
        )
        with torch.device("meta"):
            model = self.position_parts.model(config)
        prefix = "" if self.base_model is self else f"{self.base_model_prefix}."
        return positions - {prefix + key for key in model.state_dict()}

    def _is_position(self, key: str) -> bool:
        """Whether a parameter, by its name, belongs to a scheme."""
        module, _, name = key.rpartition(".")
        return name in vars(self.get_submodule(module)).get("position_initial", {})


def _trained_schemes(config) -> set[str]:
    """Names of the schemes that the weights beside a loaded config were trained with; empty if nothing says so."""
    names = (config._trained_position_scheme or "").split("+")
    return {ALIASES.get(name, name) for name in names if name}


def _carries(scheme: AttentionScheme, implementation: str) -> bool:
    """Whether a backend, by its name in the config, can carry a scheme."""
    if "flash_attention_2" in scheme.backends:  # nothing but rotated queries and keys: any backend
        return True
    return implementation in scheme.backends


class PaddingAwarePositions:
    """Mixin over a RoBERTa-like base model: position ids count the tokens that are not padding, so they need the input.

    The embeddings work them out themselves; here they are worked out for what reads the table inside the encoder.
    """

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],  # read by transformers to know what can be asked for
    ):
        if self.encoder.needs_table_positions and position_ids is None and input_ids is not None:
            past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
            kwargs["table_position_ids"] = self.embeddings.family_position_ids(input_ids, past_length)
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
