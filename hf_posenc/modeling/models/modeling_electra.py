"""ELECTRA with position schemes: the original classes with embeddings, encoder and self-attention swapped."""

import torch
from transformers import ElectraConfig
from transformers.models.electra.modeling_electra import (
    ElectraEmbeddings,
    ElectraEncoder,
    ElectraForCausalLM,
    ElectraForMaskedLM,
    ElectraForMultipleChoice,
    ElectraForPreTraining,
    ElectraForQuestionAnswering,
    ElectraForSequenceClassification,
    ElectraForTokenClassification,
    ElectraLayer,
    ElectraModel,
    ElectraSelfAttention,
    eager_attention_forward,
)

from .configuration_posenc import PositionConfigMixin
from .embeddings import PositionEmbeddings
from .family import Family, heads
from .losses import mean_over_all
from .modeling_posenc import FamilyClasses, PosencPreTrainedModel, PositionEncoder, PositionLayer, PositionModel
from .self_attention import PositionSelfAttention


ELECTRA = Family(
    "electra",
    "Electra",
    heads=heads(AutoModelForPreTraining="ForPreTraining"),
    config_names={"table_width": "embedding_size"},
    projection="embeddings_project",
)


class PosencElectraConfig(PositionConfigMixin, ElectraConfig):
    """[`ElectraConfig`] with the config options of position schemes, see [`PositionConfigMixin`]."""

    model_type = "posenc_electra"
    family = ELECTRA


class PosencElectraEmbeddings(PositionEmbeddings, ElectraEmbeddings):
    """[`ElectraEmbeddings`] with an embedding-level scheme instead of the position embedding matrix."""

    family = ELECTRA


class PosencElectraSelfAttention(PositionSelfAttention, ElectraSelfAttention):
    """[`ElectraSelfAttention`] with attention-level schemes."""

    family = ELECTRA


class PosencElectraLayer(PositionLayer, ElectraLayer):
    """[`ElectraLayer`] that adds the embedding-level positions to its input."""


class PosencElectraEncoder(PositionEncoder, ElectraEncoder):
    """[`ElectraEncoder`] that computes the positions once for all layers."""

    family = ELECTRA


class PosencElectraModel(PosencPreTrainedModel, PositionModel, ElectraModel):
    """[`ElectraModel`] with the position schemes that its [`PosencElectraConfig`] names."""

    config_class = PosencElectraConfig
    _no_split_modules = ["ElectraLayer"]


CLASSES = FamilyClasses(
    family=ELECTRA,
    embeddings=PosencElectraEmbeddings,
    encoder=PosencElectraEncoder,
    layer=PosencElectraLayer,
    self_attention=PosencElectraSelfAttention,
    model=PosencElectraModel,
    eager=eager_attention_forward,
)
PosencElectraModel.position_classes = CLASSES


class PosencElectraForPreTraining(PosencPreTrainedModel, ElectraForPreTraining):
    """[`ElectraForPreTraining`] with a [`PosencElectraModel`] as its base model.

    The loss is the mean over all tokens that the attention mask does not hide. Unlike other task heads, it does not ignore labels of -100.
    `Trainer` counts the labels other than -100. So set the labels of padding to -100, as `DataCollatorForTokenClassification` does. Otherwise
    the loss in training is too small, by the share of padding.
    """

    config_class = PosencElectraConfig
    position_classes = CLASSES

    def loss_over_all(self, values: tuple, arguments: dict, number: torch.Tensor) -> torch.Tensor:
        mask = arguments.get("attention_mask")
        return mean_over_all(values[0], arguments["labels"].numel() if mask is None else (mask == 1).sum(), number)


class PosencElectraForMaskedLM(PosencPreTrainedModel, ElectraForMaskedLM):
    """[`ElectraForMaskedLM`] with a [`PosencElectraModel`] as its base model."""

    config_class = PosencElectraConfig
    position_classes = CLASSES


class PosencElectraForCausalLM(PosencPreTrainedModel, ElectraForCausalLM):
    """[`ElectraForCausalLM`] with a [`PosencElectraModel`] as its base model."""

    config_class = PosencElectraConfig
    position_classes = CLASSES
    stock_loss_divides = True


class PosencElectraForSequenceClassification(PosencPreTrainedModel, ElectraForSequenceClassification):
    """[`ElectraForSequenceClassification`] with a [`PosencElectraModel`] as its base model."""

    config_class = PosencElectraConfig
    position_classes = CLASSES


class PosencElectraForMultipleChoice(PosencPreTrainedModel, ElectraForMultipleChoice):
    """[`ElectraForMultipleChoice`] with a [`PosencElectraModel`] as its base model."""

    config_class = PosencElectraConfig
    position_classes = CLASSES


class PosencElectraForTokenClassification(PosencPreTrainedModel, ElectraForTokenClassification):
    """[`ElectraForTokenClassification`] with a [`PosencElectraModel`] as its base model."""

    config_class = PosencElectraConfig
    position_classes = CLASSES


class PosencElectraForQuestionAnswering(PosencPreTrainedModel, ElectraForQuestionAnswering):
    """[`ElectraForQuestionAnswering`] with a [`PosencElectraModel`] as its base model."""

    config_class = PosencElectraConfig
    position_classes = CLASSES
