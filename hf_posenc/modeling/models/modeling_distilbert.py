"""DistilBERT with position schemes: the original classes with embeddings, encoder and self-attention swapped."""

import torch
from torch import nn
from transformers import DistilBertConfig
from transformers import initialization as init
from transformers.models.distilbert.modeling_distilbert import (
    DistilBertForMaskedLM,
    DistilBertForMultipleChoice,
    DistilBertForQuestionAnswering,
    DistilBertForSequenceClassification,
    DistilBertForTokenClassification,
    DistilBertModel,
    DistilBertSelfAttention,
    Embeddings,
    Transformer,
    TransformerBlock,
    eager_attention_forward,
)

from .configuration_posenc import PositionConfigMixin
from .embeddings import PositionEmbeddings
from .family import Family, heads
from .modeling_posenc import FamilyClasses, PosencPreTrainedModel, PositionEncoder, PositionLayer, PositionModel
from .self_attention import PositionSelfAttention


DISTILBERT = Family(
    "distilbert",
    "DistilBert",
    heads=heads(AutoModelForCausalLM=None),
    config_names={
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    },
    constants={"layer_norm_eps": 1e-12, "is_decoder": False},
    encoder="transformer",
    token_types=None,
    self_attention="attention",
    query="q_lin",
    key="k_lin",
    value="v_lin",
    output="out_lin",
    heads_count="n_heads",
    linear_layers={
        "query": ("q_lin",),
        "key": ("k_lin",),
        "value": ("v_lin",),
        "output.dense": ("out_lin", "lin2"),
        "dense": ("out_lin", "lin1", "lin2"),
    },
)


class PosencDistilBertConfig(PositionConfigMixin, DistilBertConfig):
    """[`DistilBertConfig`] with the config options of position schemes, see [`PositionConfigMixin`]."""

    model_type = "posenc_distilbert"
    family = DISTILBERT


class PosencDistilBertEmbeddings(PositionEmbeddings, Embeddings):
    """[`Embeddings`] with an embedding-level scheme instead of the position embedding matrix."""

    family = DISTILBERT

    def forward(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
    ) -> torch.Tensor:
        return super().forward(input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds)


class PosencDistilBertSelfAttention(PositionSelfAttention, DistilBertSelfAttention):
    """[`DistilBertSelfAttention`] with attention-level schemes."""

    family = DISTILBERT


class PosencDistilBertTransformerBlock(PositionLayer, TransformerBlock):
    """[`TransformerBlock`] that adds the embedding-level positions to its input."""


class PosencDistilBertTransformer(PositionEncoder, Transformer):
    """[`Transformer`] that computes the positions once for all layers."""

    family = DISTILBERT


class PosencDistilBertParts(PosencPreTrainedModel):
    """What base model and heads share."""

    config_class = PosencDistilBertConfig

    def _init_stock_weights(self, module: nn.Module) -> None:
        if isinstance(module, PosencDistilBertEmbeddings) and not module.fills_table:
            # As Transformers does, but for sinusoids in a table that is gone, or that starts at zero.
            init.copy_(module.position_ids, torch.arange(module.position_ids.shape[-1]).expand((1, -1)))
        else:
            super()._init_stock_weights(module)

    def get_position_embeddings(self) -> nn.Embedding:
        """The table of absolute positions; ValueError without one."""
        self._check_table()
        return super().get_position_embeddings()

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """As in transformers; ValueError without a table of absolute positions."""
        self._check_table()
        super().resize_position_embeddings(new_num_position_embeddings)

    def _check_table(self) -> None:
        if not self.base_model.embeddings.has_table:
            raise ValueError(
                f"position_scheme={self.config.position_scheme!r} has no position embedding matrix: only 'absolute' and "
                "'tupe' have one"
            )


class PosencDistilBertModel(PosencDistilBertParts, PositionModel, DistilBertModel):
    """[`DistilBertModel`] with the position schemes that its [`PosencDistilBertConfig`] names."""

    _no_split_modules = ["TransformerBlock"]


CLASSES = FamilyClasses(
    family=DISTILBERT,
    embeddings=PosencDistilBertEmbeddings,
    encoder=PosencDistilBertTransformer,
    layer=PosencDistilBertTransformerBlock,
    self_attention=PosencDistilBertSelfAttention,
    model=PosencDistilBertModel,
    eager=eager_attention_forward,
)
PosencDistilBertParts.position_classes = CLASSES


class PosencDistilBertForMaskedLM(PosencDistilBertParts, DistilBertForMaskedLM):
    """[`DistilBertForMaskedLM`] with a [`PosencDistilBertModel`] as its base model."""


class PosencDistilBertForSequenceClassification(PosencDistilBertParts, DistilBertForSequenceClassification):
    """[`DistilBertForSequenceClassification`] with a [`PosencDistilBertModel`] as its base model."""


class PosencDistilBertForMultipleChoice(PosencDistilBertParts, DistilBertForMultipleChoice):
    """[`DistilBertForMultipleChoice`] with a [`PosencDistilBertModel`] as its base model."""


class PosencDistilBertForTokenClassification(PosencDistilBertParts, DistilBertForTokenClassification):
    """[`DistilBertForTokenClassification`] with a [`PosencDistilBertModel`] as its base model."""


class PosencDistilBertForQuestionAnswering(PosencDistilBertParts, DistilBertForQuestionAnswering):
    """[`DistilBertForQuestionAnswering`] with a [`PosencDistilBertModel`] as its base model."""
