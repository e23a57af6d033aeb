"""CamemBERT with position schemes: the stock classes with embeddings, encoder and self-attention swapped."""

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

from .attention import PositionSelfAttention
from .configuration_posenc import PosencCamembertConfig
from .embeddings import PaddedPositionEmbeddings
from .family import CAMEMBERT
from .modeling_posenc import Parts, PosencPreTrainedModel, PositionEncoder, PositionLayer, PositionModel


class PosencCamembertEmbeddings(PaddedPositionEmbeddings, CamembertEmbeddings):
    """[`CamembertEmbeddings`] with an embedding-level scheme in place of the table of positions."""

    family = CAMEMBERT


class PosencCamembertSelfAttention(PositionSelfAttention, CamembertSelfAttention):
    """[`CamembertSelfAttention`] with attention-level schemes."""

    family = CAMEMBERT


class PosencCamembertLayer(PositionLayer, CamembertLayer):
    """[`CamembertLayer`] that adds the embedding-level positions to its input."""


class PosencCamembertEncoder(PositionEncoder, CamembertEncoder):
    """[`CamembertEncoder`] that works the positions out once for all layers."""

    family = CAMEMBERT


class PosencCamembertModel(PosencPreTrainedModel, PositionModel, CamembertModel):
    """[`CamembertModel`] with the position schemes of its [`PosencCamembertConfig`]."""

    config_class = PosencCamembertConfig
    _auto_class = "AutoModel"
    _no_split_modules = ["CamembertLayer"]


PARTS = Parts(
    family=CAMEMBERT,
    embeddings=PosencCamembertEmbeddings,
    encoder=PosencCamembertEncoder,
    layer=PosencCamembertLayer,
    self_attention=PosencCamembertSelfAttention,
    model=PosencCamembertModel,
    eager=eager_attention_forward,
)
PosencCamembertModel.position_parts = PARTS


class PosencCamembertForMaskedLM(PosencPreTrainedModel, CamembertForMaskedLM):
    """[`CamembertForMaskedLM`] over a [`PosencCamembertModel`]."""

    config_class = PosencCamembertConfig
    _auto_class = "AutoModelForMaskedLM"
    position_parts = PARTS


class PosencCamembertForCausalLM(PosencPreTrainedModel, CamembertForCausalLM):
    """[`CamembertForCausalLM`] over a [`PosencCamembertModel`]."""

    config_class = PosencCamembertConfig
    _auto_class = "AutoModelForCausalLM"
    position_parts = PARTS
    stock_loss_divides = True


class PosencCamembertForSequenceClassification(PosencPreTrainedModel, CamembertForSequenceClassification):
    """[`CamembertForSequenceClassification`] over a [`PosencCamembertModel`]."""

    config_class = PosencCamembertConfig
    _auto_class = "AutoModelForSequenceClassification"
    position_parts = PARTS


class PosencCamembertForMultipleChoice(PosencPreTrainedModel, CamembertForMultipleChoice):
    """[`CamembertForMultipleChoice`] over a [`PosencCamembertModel`]."""

    config_class = PosencCamembertConfig
    _auto_class = "AutoModelForMultipleChoice"
    position_parts = PARTS


class PosencCamembertForTokenClassification(PosencPreTrainedModel, CamembertForTokenClassification):
    """[`CamembertForTokenClassification`] over a [`PosencCamembertModel`]."""

    config_class = PosencCamembertConfig
    _auto_class = "AutoModelForTokenClassification"
    position_parts = PARTS


class PosencCamembertForQuestionAnswering(PosencPreTrainedModel, CamembertForQuestionAnswering):
    """[`CamembertForQuestionAnswering`] over a [`PosencCamembertModel`]."""

    config_class = PosencCamembertConfig
    _auto_class = "AutoModelForQuestionAnswering"
    position_parts = PARTS
