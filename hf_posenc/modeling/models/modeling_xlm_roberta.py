"""XLM-RoBERTa with position schemes: the original classes with embeddings, encoder and self-attention swapped."""

from transformers import XLMRobertaConfig
from transformers.models.xlm_roberta.modeling_xlm_roberta import (
    XLMRobertaEmbeddings,
    XLMRobertaEncoder,
    XLMRobertaForCausalLM,
    XLMRobertaForMaskedLM,
    XLMRobertaForMultipleChoice,
    XLMRobertaForQuestionAnswering,
    XLMRobertaForSequenceClassification,
    XLMRobertaForTokenClassification,
    XLMRobertaLayer,
    XLMRobertaModel,
    XLMRobertaSelfAttention,
    eager_attention_forward,
)

from .configuration_posenc import PositionConfigMixin
from .embeddings import PaddedPositionEmbeddings
from .family import Family, heads
from .modeling_posenc import FamilyClasses, PosencPreTrainedModel, PositionEncoder, PositionLayer, PositionModel
from .self_attention import PositionSelfAttention


XLM_ROBERTA = Family("xlm-roberta", "XLMRoberta", heads=heads(), positions_follow_padding=True)


class PosencXLMRobertaConfig(PositionConfigMixin, XLMRobertaConfig):
    """[`XLMRobertaConfig`] with the config options of position schemes, see [`PositionConfigMixin`]."""

    model_type = "posenc_xlm_roberta"
    family = XLM_ROBERTA


class PosencXLMRobertaEmbeddings(PaddedPositionEmbeddings, XLMRobertaEmbeddings):
    """[`XLMRobertaEmbeddings`] with an embedding-level scheme instead of the position embedding matrix."""

    family = XLM_ROBERTA


class PosencXLMRobertaSelfAttention(PositionSelfAttention, XLMRobertaSelfAttention):
    """[`XLMRobertaSelfAttention`] with attention-level schemes."""

    family = XLM_ROBERTA


class PosencXLMRobertaLayer(PositionLayer, XLMRobertaLayer):
    """[`XLMRobertaLayer`] that adds the embedding-level positions to its input."""


class PosencXLMRobertaEncoder(PositionEncoder, XLMRobertaEncoder):
    """[`XLMRobertaEncoder`] that computes the positions once for all layers."""

    family = XLM_ROBERTA


class PosencXLMRobertaModel(PosencPreTrainedModel, PositionModel, XLMRobertaModel):
    """[`XLMRobertaModel`] with the position schemes that its [`PosencXLMRobertaConfig`] names."""

    config_class = PosencXLMRobertaConfig
    _no_split_modules = ["XLMRobertaLayer"]


CLASSES = FamilyClasses(
    family=XLM_ROBERTA,
    embeddings=PosencXLMRobertaEmbeddings,
    encoder=PosencXLMRobertaEncoder,
    layer=PosencXLMRobertaLayer,
    self_attention=PosencXLMRobertaSelfAttention,
    model=PosencXLMRobertaModel,
    eager=eager_attention_forward,
)
PosencXLMRobertaModel.position_classes = CLASSES


class PosencXLMRobertaForMaskedLM(PosencPreTrainedModel, XLMRobertaForMaskedLM):
    """[`XLMRobertaForMaskedLM`] with a [`PosencXLMRobertaModel`] as its base model."""

    config_class = PosencXLMRobertaConfig
    position_classes = CLASSES


class PosencXLMRobertaForCausalLM(PosencPreTrainedModel, XLMRobertaForCausalLM):
    """[`XLMRobertaForCausalLM`] with a [`PosencXLMRobertaModel`] as its base model."""

    config_class = PosencXLMRobertaConfig
    position_classes = CLASSES
    stock_loss_divides = True


class PosencXLMRobertaForSequenceClassification(PosencPreTrainedModel, XLMRobertaForSequenceClassification):
    """[`XLMRobertaForSequenceClassification`] with a [`PosencXLMRobertaModel`] as its base model."""

    config_class = PosencXLMRobertaConfig
    position_classes = CLASSES


class PosencXLMRobertaForMultipleChoice(PosencPreTrainedModel, XLMRobertaForMultipleChoice):
    """[`XLMRobertaForMultipleChoice`] with a [`PosencXLMRobertaModel`] as its base model."""

    config_class = PosencXLMRobertaConfig
    position_classes = CLASSES


class PosencXLMRobertaForTokenClassification(PosencPreTrainedModel, XLMRobertaForTokenClassification):
    """[`XLMRobertaForTokenClassification`] with a [`PosencXLMRobertaModel`] as its base model."""

    config_class = PosencXLMRobertaConfig
    position_classes = CLASSES


class PosencXLMRobertaForQuestionAnswering(PosencPreTrainedModel, XLMRobertaForQuestionAnswering):
    """[`XLMRobertaForQuestionAnswering`] with a [`PosencXLMRobertaModel`] as its base model."""

    config_class = PosencXLMRobertaConfig
    position_classes = CLASSES
