"""MPNet with position schemes: the original classes with embeddings, encoder, layers and self-attention swapped.

Transformers' bias by distance is the scheme `t5` here, so `absolute+t5` computes what Transformers computes, with one exception: given
`position_ids`, Transformers' bias ignores them, and schemes do not. Transformers has eager attention alone, these have all backends.
"""

from typing import Any

import torch
from torch import nn
from transformers import MPNetConfig
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling
from transformers.models.mpnet.modeling_mpnet import (
    MPNetAttention,
    MPNetEmbeddings,
    MPNetEncoder,
    MPNetForMaskedLM,
    MPNetForMultipleChoice,
    MPNetForQuestionAnswering,
    MPNetForSequenceClassification,
    MPNetForTokenClassification,
    MPNetLayer,
    MPNetModel,
    MPNetSelfAttention,
    create_position_ids_from_input_ids,
)

from ..attention.backends import Attention, Output, eager
from ..masks import Mask
from ..schemes.base import AttentionScheme
from ..stock_interface import ModelInputs, Receives, bidirectional_mask
from .configuration_posenc import PositionConfigMixin
from .embeddings import PositionEmbeddings
from .family import Family, heads
from .modeling_posenc import (
    FamilyClasses,
    PosencPreTrainedModel,
    PositionEncoder,
    PositionLayer,
    PositionModel,
    RepeatedPositions,
    become,
)
from .self_attention import ModuleReference, PositionSelfAttention


MPNET = Family(
    "mpnet",
    "MPNet",
    heads=heads(AutoModelForCausalLM=None, AutoModelForTextEncoding=None),
    native_scheme="absolute+t5",
    # Transformers' code has these numbers, and looks at no config for them; nor for the row of padding in its tables.
    native_flags={"position_buckets": 32, "position_max_distance": 128, "position_per_layer": False},
    native_keys={"t5": "encoder.relative_attention_bias.weight"},
    positions_follow_padding=True,
    constants={"pad_token_id": 1, "is_decoder": False},
    token_types=None,
    self_attention="attention.attn",
    query="q",
    key="k",
    value="v",
    output="o",
    linear_layers={
        "query": ("q",),
        "key": ("k",),
        "value": ("v",),
        "output.dense": ("o", "output.dense"),
        "dense": ("o", "dense"),
    },
)


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> Output:
    """Attention without terms as transformers' eager functions have it: its MPNet has none."""
    mask = Mask.of(attention_mask, query, key)
    return eager(Attention(module, "eager", query, query, key, value, [], mask, scaling, dropout))


class PosencMPNetConfig(PositionConfigMixin, MPNetConfig):
    """[`MPNetConfig`] with the config options of position schemes, see [`PositionConfigMixin`]."""

    model_type = "posenc_mpnet"
    family = MPNET


class PosencMPNetEmbeddings(PositionEmbeddings, MPNetEmbeddings):
    """[`MPNetEmbeddings`] with an embedding-level scheme instead of the position embedding matrix."""

    family = MPNET

    def family_position_ids(self, input_ids: torch.Tensor | None, past_length: int) -> torch.Tensor | None:
        return None if input_ids is None else create_position_ids_from_input_ids(input_ids, self.padding_idx)


class PosencMPNetSelfAttention(PositionSelfAttention, MPNetSelfAttention):
    """[`MPNetSelfAttention`] with attention-level schemes, and with backends."""

    family = MPNET
    is_causal = False
    # Layers of this file call it, and none of Transformers'.
    receives = Receives(("hidden_states", "attention_mask"), "attention_mask")

    def install(self, config, layer: int, schemes: tuple[AttentionScheme, ...], eager) -> None:
        self.config = config
        self.scaling = self.head_dim**-0.5
        super().install(config, layer, schemes, eager)


class PosencMPNetAttention(MPNetAttention):
    """[`MPNetAttention`] that hands keywords on."""

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, weights = self.attn(hidden_states, *args, **kwargs)
        return self.LayerNorm(self.dropout(output) + hidden_states), weights


class PosencMPNetLayer(PositionLayer, MPNetLayer):
    """[`MPNetLayer`] that hands keywords on, and adds the embedding-level positions to its input."""

    def forward(
        self, hidden_states: torch.Tensor, *args, repeated_positions: RepeatedPositions | None = None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden_states = self.with_positions(hidden_states, repeated_positions)
        hidden_states, weights = self.attention(hidden_states, *args, **kwargs)
        return self.output(self.intermediate(hidden_states), hidden_states), weights


class PosencMPNetEncoder(PositionEncoder, MPNetEncoder):
    """[`MPNetEncoder`] that computes the positions once for all layers."""

    family = MPNET

    def install(self, config, schemes: tuple[AttentionScheme, ...], every_layer: bool) -> None:
        # The scheme t5 puts its own in this place.
        del self.relative_attention_bias
        for layer in self.layer:
            become(layer, PosencMPNetLayer)
            become(layer.attention, PosencMPNetAttention)
        super().install(config, schemes, every_layer)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = False,
        given_mask: Any = None,
        given_position_ids: torch.Tensor | None = None,
        table_position_ids: torch.Tensor | None = None,
        base_model: ModuleReference | None = None,
        packing: Any = None,
        **kwargs,
    ) -> tuple[torch.Tensor, ...] | BaseModelOutput:
        mask = attention_mask if given_mask is None else given_mask
        where = None, mask, given_position_ids, table_position_ids
        hidden_states, own = self.prepare(hidden_states, *where, base_model, packing)
        all_hidden_states, all_weights = [hidden_states], []
        for layer in self.layer:
            hidden_states, weights = layer(
                hidden_states, attention_mask, wants_weights=output_attentions, **kwargs, **own
            )
            all_hidden_states.append(hidden_states)
            all_weights.append(weights)
        output = BaseModelOutput(
            last_hidden_state=own["packing"].pad_input(hidden_states) if "packing" in own else hidden_states,
            hidden_states=tuple(all_hidden_states) if output_hidden_states else None,
            attentions=tuple(all_weights) if output_attentions else None,
        )
        return output if return_dict else output.to_tuple()


class PosencMPNetParts(PosencPreTrainedModel):
    """What base model and heads share."""

    config_class = PosencMPNetConfig
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.config._attn_implementation_internal = self._chosen_implementation

    def _check_and_adjust_attn_implementation(self, attn_implementation, is_init_check: bool = False, **kwargs):
        """As for all families; but a task head under construction builds an original base model, which refuses all but eager."""
        checked = super()._check_and_adjust_attn_implementation(
            attn_implementation, is_init_check=is_init_check, **kwargs
        )
        if not is_init_check:
            return checked
        self._chosen_implementation = checked
        return "eager"


class PosencMPNetModel(PosencMPNetParts, PositionModel, MPNetModel):
    """[`MPNetModel`] with the position schemes that its [`PosencMPNetConfig`] names."""

    _no_split_modules = ["PosencMPNetLayer"]

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor] | BaseModelOutputWithPooling:
        """As Transformers', which hands neither positions nor keywords to its encoder."""
        config = self.config
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return_dict = config.return_dict if return_dict is None else return_dict
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, and not both")

        given = {"input_ids": input_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        recorded = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        inputs = ModelInputs({**given, **recorded}, attention_mask)
        embedded = self.embeddings(**{**given, "position_ids": self.position_ids_of(inputs)})
        outputs = self.encoder(
            embedded,
            bidirectional_mask(config, embedded, attention_mask),
            return_dict=True,
            **recorded,
            **self.for_the_encoder(inputs),
        )
        pooled = self.pooler(outputs.last_hidden_state) if self.pooler is not None else None
        if not return_dict:
            return outputs.last_hidden_state, pooled, *outputs.to_tuple()[1:]
        return BaseModelOutputWithPooling(
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=pooled,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


CLASSES = FamilyClasses(
    family=MPNET,
    embeddings=PosencMPNetEmbeddings,
    encoder=PosencMPNetEncoder,
    layer=PosencMPNetLayer,
    self_attention=PosencMPNetSelfAttention,
    model=PosencMPNetModel,
    eager=eager_attention,
)
PosencMPNetParts.position_classes = CLASSES


class PosencMPNetForMaskedLM(PosencMPNetParts, MPNetForMaskedLM):
    """[`MPNetForMaskedLM`] with a [`PosencMPNetModel`] as its base model."""


class PosencMPNetForSequenceClassification(PosencMPNetParts, MPNetForSequenceClassification):
    """[`MPNetForSequenceClassification`] with a [`PosencMPNetModel`] as its base model."""


class PosencMPNetForMultipleChoice(PosencMPNetParts, MPNetForMultipleChoice):
    """[`MPNetForMultipleChoice`] with a [`PosencMPNetModel`] as its base model."""


class PosencMPNetForTokenClassification(PosencMPNetParts, MPNetForTokenClassification):
    """[`MPNetForTokenClassification`] with a [`PosencMPNetModel`] as its base model."""


class PosencMPNetForQuestionAnswering(PosencMPNetParts, MPNetForQuestionAnswering):
    """[`MPNetForQuestionAnswering`] with a [`PosencMPNetModel`] as its base model."""
