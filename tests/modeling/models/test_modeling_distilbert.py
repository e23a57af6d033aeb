"""DistilBERT: what is its own, beside what all families promise."""

import pytest
import torch
from tiny import build, inputs, stock_config, variant_class, variant_config
from transformers import AutoModel, DistilBertModel


pytestmark = pytest.mark.usefixtures("blocks_for_all_lengths")


SCHEMES = ["absolute", "t5", "deberta+transformer_xl+relative", "rope+alibi", "tupe+t5", "sinusoidal"]


@torch.no_grad()
def output(model, **given) -> torch.Tensor:
    return model.eval()(**inputs(family="distilbert"), **given).last_hidden_state


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_computes_what_bert_computes_with_the_same_weights(scheme, implementation):
    """BERT without types, its layers under DistilBERT's names, is the same function: every scheme must see it so."""
    bert = build(scheme, "bert", attn_implementation=implementation)
    bert.embeddings.token_type_embeddings.weight.data.zero_()
    model = variant_class("distilbert")(
        variant_config("distilbert", position_scheme=scheme, hidden_act="gelu", attn_implementation=implementation)
    )
    names = {
        "encoder.layer": "transformer.layer",
        "encoder.": "transformer.",
        "attention.self.query.": "attention.q_lin.",
        "attention.self.key.": "attention.k_lin.",
        "attention.self.value.": "attention.v_lin.",
        "attention.output.dense": "attention.out_lin",
        "attention.output.LayerNorm": "sa_layer_norm",
        "attention.self.": "attention.",
        "intermediate.dense": "ffn.lin1",
        "output.dense": "ffn.lin2",
        "output.LayerNorm": "output_layer_norm",
    }
    state = {}
    for key, value in bert.state_dict().items():
        if not key.startswith("pooler") and "token_type" not in key:
            for theirs, own in names.items():
                key = key.replace(theirs, own)
            state[key] = value
    model.load_state_dict(state)
    assert (output(model) - bert(**inputs(family="distilbert")).last_hidden_state).abs().max() < 1e-5
    position_ids = torch.tensor([[0, 2, 4, 6, 8, 10, 11, 12, 13, 14, 15, 20]])
    moved = output(model, position_ids=position_ids)
    theirs = bert(**inputs(family="distilbert"), position_ids=position_ids).last_hidden_state
    assert (moved - theirs).abs().max() < 1e-5
    assert (moved - output(model)).abs().max() > 1e-3


class TestSinusoids:
    def test_fill_the_table_of_absolute_as_stock_does(self):
        torch.manual_seed(0)
        stock = DistilBertModel(stock_config("distilbert", sinusoidal_pos_embds=True))
        torch.manual_seed(0)
        variant = DistilBertModel(stock_config("distilbert", sinusoidal_pos_embds=True, position_scheme="absolute"))
        assert torch.equal(variant.embeddings.position_embeddings.weight, stock.embeddings.position_embeddings.weight)
        assert variant.embeddings.position_embeddings.weight[0, 1] == 1

    @pytest.mark.parametrize("scheme", ["t5", "sinusoidal", "none", "deberta"])
    def test_are_no_obstacle_to_schemes_without_a_table(self, scheme, tmp_path):
        DistilBertModel(stock_config("distilbert", sinusoidal_pos_embds=True)).save_pretrained(tmp_path)
        model = AutoModel.from_pretrained(tmp_path, position_scheme=scheme)
        assert not model.embeddings.has_table and output(model).isfinite().all()
        assert model.embeddings.position_ids.tolist() == [[*range(64)]]

    def test_are_not_put_into_a_table_that_starts_silent(self, tmp_path):
        build("t5", "distilbert", sinusoidal_pos_embds=True).save_pretrained(tmp_path)
        before = output(AutoModel.from_pretrained(tmp_path))
        model = AutoModel.from_pretrained(tmp_path, position_scheme="absolute+t5")
        assert model.embeddings.position_embeddings.weight.abs().max() == 0
        assert torch.equal(output(model), before)


def test_the_table_is_had_and_resized_where_there_is_one():
    model = build("absolute+t5", "distilbert")
    assert model.get_position_embeddings() is model.embeddings.position_embeddings
    before = output(model)
    model.resize_position_embeddings(80)
    assert model.get_position_embeddings().weight.shape == (80, 32) and model.config.max_position_embeddings == 80
    assert torch.equal(output(model), before)
    assert model(**inputs(length=78, family="distilbert")).last_hidden_state.shape == (3, 78, 32)
    for head in ("Model", "ForMaskedLM"):
        without = build("t5", "distilbert", head)
        refused = pytest.raises(ValueError, match="position_scheme='t5' has no position embedding matrix")
        with refused:
            without.get_position_embeddings()
        with refused:
            without.resize_position_embeddings(80)
