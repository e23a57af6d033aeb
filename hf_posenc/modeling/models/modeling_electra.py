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
    """[`ElectraConfig`] with the `position_*` options of [`PositionConfigMixin`]."""

    model_type = "posenc_electra"
    family = ELECTRA


class PosencElectraEmbeddings(PositionEmbeddings, ElectraEmbeddings):
    """[`ElectraEmbeddings`] with an embedding-level scheme in place of the table of positions."""

    family = ELECTRA


class PosencElectraSelfAttention(PositionSelfAttention, ElectraSelfAttention):
    """[`ElectraSelfAttention`] with attention-level schemes."""

    family = ELECTRA


class PosencElectraLayer(PositionLayer, ElectraLayer):
    """[`ElectraLayer`] that adds the embedding-level positions to its input."""


class PosencElectraEncoder(PositionEncoder, ElectraEncoder):
    """[`ElectraEncoder`] that works the positions out once for all layers."""

    family = ELECTRA


class PosencElectraModel(PosencPreTrainedModel, PositionModel, ElectraModel):
    """[`ElectraModel`] with the position schemes of its [`PosencElectraConfig`]."""

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
    """[`ElectraForPreTraining`] over a [`PosencElectraModel`].

    Its loss counts the tokens that are not padding by the attention mask, or all without a mask; unlike other heads it
    does not ignore labels of -100. `Trainer`, in `num_items_in_batch`, counts labels other than -100: set those of
    padding to -100 (as `DataCollatorForTokenClassification` does), or its losses are too small by the share of padding.
    """

    config_class = PosencElectraConfig
    position_classes = CLASSES

    def loss_over_all(self, values: tuple, arguments: dict, number: torch.Tensor) -> torch.Tensor:
        mask = arguments.get("attention_mask")
        return mean_over_all(values[0], arguments["labels"].numel() if mask is None else (mask == 1).sum(), number)


class PosencElectraForMaskedLM(PosencPreTrainedModel, ElectraForMaskedLM):
    """[`ElectraForMaskedLM`] over a [`PosencElectraModel`]."""

    config_class = PosencElectraConfig
    position_classes = CLASSES


class PosencElectraForCausalLM(PosencPreTrainedModel, ElectraForCausalLM):
    """[`ElectraForCausalLM`] over a [`PosencElectraModel`]."""

    config_class = PosencElectraConfig
    position_classes = CLASSES
    stock_loss_divides = True


class PosencElectraForSequenceClassification(PosencPreTrainedModel, ElectraForSequenceClassification):
    """[`ElectraForSequenceClassification`] over a [`PosencElectraModel`]."""

    config_class = PosencElectraConfig
    position_classes = CLASSES


class PosencElectraForMultipleChoice(PosencPreTrainedModel, ElectraForMultipleChoice):
    """[`ElectraForMultipleChoice`] over a [`PosencElectraModel`]."""

    config_class = PosencElectraConfig
    position_classes = CLASSES


class PosencElectraForTokenClassification(PosencPreTrainedModel, ElectraForTokenClassification):
    """[`ElectraForTokenClassification`] over a [`PosencElectraModel`]."""

    config_class = PosencElectraConfig
    position_classes = CLASSES


class PosencElectraForQuestionAnswering(PosencPreTrainedModel, ElectraForQuestionAnswering):
    """[`ElectraForQuestionAnswering`] over a [`PosencElectraModel`]."""

    config_class = PosencElectraConfig
    position_classes = CLASSES
