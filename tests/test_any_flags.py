"""Any combination of flags either works, all the way from loading to saving, or is refused by name."""

import tempfile

import pytest
import tiny
import torch
from transformers import AutoModel

from hf_posenc import position_parameters
from hf_posenc.modeling.models.configuration_posenc import FLAGS
from hf_posenc.modeling.schemes.table import ALIASES, ALL, SCHEMES


pytestmark = pytest.mark.slow


def values() -> dict:
    """Flag -> what is drawn for it, right and wrong."""
    from hypothesis import strategies as st

    names = st.sampled_from([*SCHEMES, *ALIASES])
    found = {
        "position_scheme": st.lists(names, min_size=1, max_size=3).map("+".join),
        "position_combine": st.sampled_from(["add", "concat", "gate", "attention", "multiply"]),
        "position_every_layer": st.booleans(),
        "position_every_layer_weight": st.sampled_from([0, 1.0, -1.0]),
        "position_width": st.sampled_from([0, 8, 32, 64, -1]),
        "position_learn_amplitude": st.booleans(),
        "position_init": st.sampled_from(["silent", "paper", "loud"]),
        "position_form": st.sampled_from(["checkpoint", "paper"]),
        "position_base": st.sampled_from([1, 2.5, 500, 10000.0, -3, "10"]),
        "position_layout": st.sampled_from(["interleaved", "halves"]),
        "position_amplitude": st.sampled_from([0, 0.1, 1.0, float("nan")]),
        "position_frequency": st.sampled_from([0, 0.5, 3, 4]),
        "position_rope_scaling": st.sampled_from(
            [
                {"rope_type": "linear", "factor": 2.0},
                {"rope_type": "yarn", "factor": 4.0},
                {"rope_type": "spiral"},
                {},
                2,
            ]
        ),
        "position_buckets": st.sampled_from([0, 1, 2, 4, 7, 8, 32]),
        "position_max_distance": st.sampled_from([0, 1, 2, 3, 5, 8, 9, 64, 128]),
        "position_per_layer": st.booleans(),
        "position_on_values": st.booleans(),
        "position_attention_types": st.sampled_from(
            [["c2p"], ["p2c"], ["c2p", "p2c", "p2p"], ["p2p"], [], ["c2c"], "c2p"]
        ),
        "position_share_projections": st.booleans(),
        "position_norm": st.booleans(),
        "posiiton_norm": st.just(3),
    }
    for flag, owners in FLAGS.items():
        for own in owners.values():
            found.setdefault(flag, st.sampled_from([own.default, tiny.another_value(own), [{"a": 1}]]))
    return found


def applicable(scheme: str) -> list[str]:
    """The flags that belong to a composite, so that most examples get past the first check."""
    parts = [ALIASES.get(name, name) for name in scheme.split("+")]
    of_all = {flag for flag, users in FLAGS.items() if ALL in users}
    return sorted(of_all | {flag.name for name in parts for flag in SCHEMES[name].flags})


def test_every_flag_is_drawn():
    assert FLAGS.keys() <= values().keys()


def test_any_combination_works_or_is_refused_by_name():
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    of_flags = values()

    @st.composite
    def flags(draw) -> dict:
        scheme = draw(of_flags["position_scheme"])
        chosen = draw(st.lists(st.sampled_from(applicable(scheme) or ["position_combine"]), unique=True, max_size=5))
        if draw(st.integers(0, 9)) == 0:
            chosen.append(draw(st.sampled_from(sorted(of_flags.keys() - {"position_scheme"}))))
        return {"position_scheme": scheme, **{name: draw(of_flags[name]) for name in chosen}}

    families = st.sampled_from(sorted(tiny.FAMILIES))
    check = given(flags=flags(), family=families, is_decoder=st.booleans())(works_or_is_refused_by_name)
    settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))(check)()


def works_or_is_refused_by_name(flags, family, is_decoder):
    inputs = tiny.inputs(batch=2, length=7, family=family)
    try:
        config = tiny.stock_config(family, num_hidden_layers=2, is_decoder=is_decoder, use_cache=False, **flags)
    except (ValueError, TypeError) as error:
        assert any(name in str(error) for name in flags), f"{error} names none of {list(flags)}"
        return
    torch.manual_seed(0)
    model = AutoModel.from_config(config)
    tiny.fill_positions(model, std=0.1).train()
    output = model(**inputs).last_hidden_state
    output.square().mean().backward()
    assert output.isfinite().all()
    for name, parameter in position_parameters(model).items():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    model.eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        again = tiny.aligned(AutoModel.from_pretrained(folder))
        assert type(again) is type(model)
        assert torch.equal(again(**inputs).last_hidden_state, model(**inputs).last_hidden_state)
