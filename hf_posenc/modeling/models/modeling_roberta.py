"""RoBERTa with position schemes: the original classes with embeddings, encoder and self-attention swapped."""

from transformers import RobertaConfig
from transformers.models.roberta.modeling_roberta import (
    RobertaEmbeddings,
    RobertaEncoder,
    RobertaForCausalLM,
    RobertaForMaskedLM,
    RobertaForMultipleChoice,
    RobertaForQuestionAnswering,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaLayer,
    RobertaModel,
    RobertaSelfAttention,
    eager_attention_forward,
)

from .configuration_posenc import PositionConfigMixin
from .embeddings import PaddedPositionEmbeddings
from .family import Family, heads
from .modeling_posenc import FamilyClasses, PosencPreTrainedModel, PositionEncoder, PositionLayer, PositionModel
from .self_attention import PositionSelfAttention


ROBERTA = Family("roberta", "Roberta", heads=heads(), positions_follow_padding=True)


class PosencRobertaConfig(PositionConfigMixin, RobertaConfig):
    """[`RobertaConfig`] with the config options of position schemes, see [`PositionConfigMixin`]."""

    model_type = "posenc_roberta"
    family = ROBERTA


class PosencRobertaEmbeddings(PaddedPositionEmbeddings, RobertaEmbeddings):
    """[`RobertaEmbeddings`] with an embedding-level scheme instead of the position embedding matrix."""

    family = ROBERTA


class PosencRobertaSelfAttention(PositionSelfAttention, RobertaSelfAttention):
    """[`RobertaSelfAttention`] with attention-level schemes."""

    family = ROBERTA


class PosencRobertaLayer(PositionLayer, RobertaLayer):
    """[`RobertaLayer`] that adds the embedding-level positions to its input."""


class PosencRobertaEncoder(PositionEncoder, RobertaEncoder):
    """[`RobertaEncoder`] that computes the positions once for all layers."""

    family = ROBERTA


class PosencRobertaModel(PosencPreTrainedModel, PositionModel, RobertaModel):
    """[`RobertaModel`] with the position schemes that its [`PosencRobertaConfig`] names."""

    config_class = PosencRobertaConfig
    _no_split_modules = ["RobertaLayer"]


CLASSES = FamilyClasses(
    family=ROBERTA,
    embeddings=PosencRobertaEmbeddings,
    encoder=PosencRobertaEncoder,
    layer=PosencRobertaLayer,
    self_attention=PosencRobertaSelfAttention,
    model=PosencRobertaModel,
    eager=eager_attention_forward,
)
PosencRobertaModel.position_classes = CLASSES


class PosencRobertaForMaskedLM(PosencPreTrainedModel, RobertaForMaskedLM):
    """[`RobertaForMaskedLM`] with a [`PosencRobertaModel`] as its base model."""

    config_class = PosencRobertaConfig
    position_classes = CLASSES


class PosencRobertaForCausalLM(PosencPreTrainedModel, RobertaForCausalLM):
    """[`RobertaForCausalLM`] with a [`PosencRobertaModel`] as its base model."""

    config_class = PosencRobertaConfig
    position_classes = CLASSES
    stock_loss_divides = True


class PosencRobertaForSequenceClassification(PosencPreTrainedModel, RobertaForSequenceClassification):
    """[`RobertaForSequenceClassification`] with a [`PosencRobertaModel`] as its base model."""

    config_class = PosencRobertaConfig
    position_classes = CLASSES


class PosencRobertaForMultipleChoice(PosencPreTrainedModel, RobertaForMultipleChoice):
    """[`RobertaForMultipleChoice`] with a [`PosencRobertaModel`] as its base model."""

    config_class = PosencRobertaConfig
    position_classes = CLASSES


class PosencRobertaForTokenClassification(PosencPreTrainedModel, RobertaForTokenClassification):
    """[`RobertaForTokenClassification`] with a [`PosencRobertaModel`] as its base model."""

    config_class = PosencRobertaConfig
    position_classes = CLASSES


class PosencRobertaForQuestionAnswering(PosencPreTrainedModel, RobertaForQuestionAnswering):
    """[`RobertaForQuestionAnswering`] with a [`PosencRobertaModel`] as its base model."""

    config_class = PosencRobertaConfig
    position_classes = CLASSES
