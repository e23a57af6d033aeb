"""CamemBERT with position schemes: the original classes with embeddings, encoder and self-attention swapped."""

from transformers import CamembertConfig
from transformers.models.camembert.modeling_camembert import (
    CamembertEmbeddings,
    CamembertEncoder,
    CamembertForCausalLM,
    CamembertForMaskedLM,
    CamembertForMultipleChoice,
    CamembertForQuestionAnswering,
    CamembertForSequenceClassification,
    CamembertForTokenClassification,
    CamembertLayer,
    CamembertModel,
    CamembertSelfAttention,
    eager_attention_forward,
)

from .configuration_posenc import PositionConfigMixin
from .embeddings import PaddedPositionEmbeddings
from .family import Family, heads
from .modeling_posenc import FamilyClasses, PosencPreTrainedModel, PositionEncoder, PositionLayer, PositionModel
from .self_attention import PositionSelfAttention


CAMEMBERT = Family("camembert", "Camembert", heads=heads(AutoModelForTextEncoding=None), positions_follow_padding=True)


class PosencCamembertConfig(PositionConfigMixin, CamembertConfig):
    """[`CamembertConfig`] with the config options of position schemes, see [`PositionConfigMixin`]."""

    model_type = "posenc_camembert"
    family = CAMEMBERT


class PosencCamembertEmbeddings(PaddedPositionEmbeddings, CamembertEmbeddings):
    """[`CamembertEmbeddings`] with an embedding-level scheme instead of the position embedding matrix."""

    family = CAMEMBERT


class PosencCamembertSelfAttention(PositionSelfAttention, CamembertSelfAttention):
    """[`CamembertSelfAttention`] with attention-level schemes."""

    family = CAMEMBERT


class PosencCamembertLayer(PositionLayer, CamembertLayer):
    """[`CamembertLayer`] that adds the embedding-level positions to its input."""


class PosencCamembertEncoder(PositionEncoder, CamembertEncoder):
    """[`CamembertEncoder`] that computes the positions once for all layers."""

    family = CAMEMBERT


class PosencCamembertModel(PosencPreTrainedModel, PositionModel, CamembertModel):
    """[`CamembertModel`] with the position schemes that its [`PosencCamembertConfig`] names."""

    config_class = PosencCamembertConfig
    _no_split_modules = ["CamembertLayer"]


CLASSES = FamilyClasses(
    family=CAMEMBERT,
    embeddings=PosencCamembertEmbeddings,
    encoder=PosencCamembertEncoder,
    layer=PosencCamembertLayer,
    self_attention=PosencCamembertSelfAttention,
    model=PosencCamembertModel,
    eager=eager_attention_forward,
)
PosencCamembertModel.position_classes = CLASSES


class PosencCamembertForMaskedLM(PosencPreTrainedModel, CamembertForMaskedLM):
    """[`CamembertForMaskedLM`] with a [`PosencCamembertModel`] as its base model."""

    config_class = PosencCamembertConfig
    position_classes = CLASSES


class PosencCamembertForCausalLM(PosencPreTrainedModel, CamembertForCausalLM):
    """[`CamembertForCausalLM`] with a [`PosencCamembertModel`] as its base model."""

    config_class = PosencCamembertConfig
    position_classes = CLASSES
    stock_loss_divides = True


class PosencCamembertForSequenceClassification(PosencPreTrainedModel, CamembertForSequenceClassification):
    """[`CamembertForSequenceClassification`] with a [`PosencCamembertModel`] as its base model."""

    config_class = PosencCamembertConfig
    position_classes = CLASSES


class PosencCamembertForMultipleChoice(PosencPreTrainedModel, CamembertForMultipleChoice):
    """[`CamembertForMultipleChoice`] with a [`PosencCamembertModel`] as its base model."""

    config_class = PosencCamembertConfig
    position_classes = CLASSES


class PosencCamembertForTokenClassification(PosencPreTrainedModel, CamembertForTokenClassification):
    """[`CamembertForTokenClassification`] with a [`PosencCamembertModel`] as its base model."""

    config_class = PosencCamembertConfig
    position_classes = CLASSES


class PosencCamembertForQuestionAnswering(PosencPreTrainedModel, CamembertForQuestionAnswering):
    """[`CamembertForQuestionAnswering`] with a [`PosencCamembertModel`] as its base model."""

    config_class = PosencCamembertConfig
    position_classes = CLASSES
