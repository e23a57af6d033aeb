"""What variants, unpadded stock models and stock models with our attention compute, for test_renamed_transformers.py.

Run in a process of its own, with transformers as it is or rewritten; see [`compute`]. Each check compares what it can within
the process (cached decoding with uncached, masked tokens with other ones) and returns what another process must compute too.
"""

import renamed_transformers


# Schemes that go each way through the model: terms by distance, rotation, a shared table, the table of absolute positions inside
# the attention, no parameters, value-side terms.
SCHEMES = ("absolute+t5", "rope", "deberta", "tupe", "sinusoidal", "relative")
DECODERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra")


def compute(kind: str | None, file: str) -> None:
    """Save what the checks compute, by name.

    Args:
        kind: how transformers is rewritten before it is imported; None leaves it as it is.
    """
    if kind is not None:
        renamed_transformers.install(kind)
    import torch

    torch.set_num_threads(1)
    found = {}
    for check in (stock, variants, heads, decoders, checkpointed, unpadded, stock_attention, generated):
        if check is generated and kind == "public":
            continue  # `generate` would have to be rewritten as well
        for name, tensor in check():
            assert tensor.isfinite().all(), (check.__name__, name)
            found[check.__name__, name] = tensor.detach()
    if kind is not None:
        renamed_transformers.check_all_rewritten(kind)
    torch.save(found, file)


def stock():
    """Stock models without the plugin's hooks: where they fail, it is the rewriting that is wrong."""
    import stock_models
    import tiny
    import torch
    from transformers import AutoModel

    import hf_posenc

    hf_posenc.uninstall()
    for family in tiny.STOCK_CONFIGS:
        for implementation in ("eager",) if family == "mpnet" else ("eager", "sdpa"):
            torch.manual_seed(0)
            model = AutoModel.from_config(tiny.stock_config(family, attn_implementation=implementation)).eval()
            with torch.no_grad():
                yield f"{family} {implementation}", model(**padded_inputs(family)).last_hidden_state
    for case in stock_models.KINDS:
        with torch.no_grad():
            yield case, stock_models.build(case)(**stock_models.batch(20, "right")).last_hidden_state
    for family in DECODERS:
        for cross in (False, True):
            torch.manual_seed(0)
            config = tiny.stock_config(family, is_decoder=True, add_cross_attention=cross)
            yield from decoded(AutoModel.from_config(config).eval(), f"{family} cross={cross}")
    hf_posenc.install()


def padded_inputs(family: str) -> dict:
    """A batch with so much padding that it is left out."""
    import tiny

    return tiny.inputs(batch=8, length=20, family=family)


def check_positions_matter(model, inputs: dict, scheme: str) -> None:
    """What is random where it starts at zero changes the output, so that a term that is left out shows."""
    import tiny
    import torch

    from hf_posenc import position_parameters

    parameters = position_parameters(model)
    assert parameters or scheme in ("rope", "sinusoidal"), scheme
    if parameters:
        filled = model(**inputs).last_hidden_state
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.zero_()
        silent = model(**inputs).last_hidden_state
        assert tiny.difference_where_attended(filled, silent, inputs["attention_mask"]) > 1e-2, scheme
        tiny.fill_positions(model)


def variants():
    """Every family with every scheme, padding left out and computed."""
    import tiny
    import torch

    settings = [(scheme, {}) for scheme in SCHEMES] + [("sinusoidal", {"position_every_layer": True})]
    for family in tiny.FAMILIES:
        inputs = padded_inputs(family)
        mask = inputs["attention_mask"].bool()
        other_padding = {**inputs, "input_ids": torch.where(mask, inputs["input_ids"], 7)}
        for scheme, flags in settings:
            for implementation in ("sdpa", "eager"):
                model = tiny.build(scheme, family, attn_implementation=implementation, **flags)
                with torch.no_grad():
                    check_positions_matter(model, inputs, scheme)
                    packed = model(**inputs).last_hidden_state
                    model.config.unpad = False
                    padded = model(**inputs).last_hidden_state
                    weights = model(**inputs, output_attentions=True).attentions
                    if family in ("bert", "electra", "distilbert"):  # others count positions by what is padding
                        other = model(**other_padding).last_hidden_state
                        torch.testing.assert_close(other[mask], padded[mask], rtol=0, atol=1e-4)
                assert not packed[~mask].any() and padded[~mask].any()
                torch.testing.assert_close(packed[mask], padded[mask], rtol=0, atol=1e-4)
                yield f"{family} {scheme} {flags} {implementation} packed", packed
                yield f"{family} {scheme} {flags} {implementation} padded", padded
                if implementation == "eager":
                    assert len(weights) == 2
                    yield f"{family} {scheme} {flags} weights", torch.stack(weights)


def heads():
    """A head of every family, trained."""
    import tiny

    for family in tiny.FAMILIES:
        inputs = padded_inputs(family)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        model = tiny.build("absolute+t5", family, "ForMaskedLM")
        output = model(**inputs, labels=labels)
        output.loss.backward()
        yield f"{family} loss", output.loss
        yield f"{family} logits", output.logits
        yield from gradients(model, family)


def gradients(model, name: str):
    """The norm of each gradient."""
    for parameter, tensor in model.named_parameters():
        if tensor.grad is not None:
            yield f"{name} {parameter}", tensor.grad.norm()


def checkpointed():
    """Gradients with layers computed again in the backward pass, both ways that PyTorch has."""
    import tiny

    for family in ("bert", "distilbert"):
        for scheme in ("absolute+t5", "deberta"):
            expected = None
            for reentrant in (None, False, True):
                model = tiny.build(scheme, family, "ForMaskedLM", unpad=False).train()
                if reentrant is not None:
                    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                inputs = padded_inputs(family)
                model(**inputs, labels=inputs["input_ids"]).loss.backward()
                found = dict(gradients(model, f"{family} {scheme}"))
                expected = found if expected is None else expected
                assert found.keys() == expected.keys()
                for name, norm in found.items():
                    assert abs(norm - expected[name]) < 1e-4 * max(float(expected[name]), 1.0), (name, reentrant)
            yield from expected.items()


def decoders():
    """Decoders of every family with every scheme."""
    import tiny

    for family in DECODERS:
        for scheme in SCHEMES:
            for cross in (False, True):
                model = tiny.build(scheme, family, is_decoder=True, add_cross_attention=cross)
                yield from decoded(model, f"{family} {scheme} cross={cross}")


def decoded(model, name: str):
    """A text read at once and in pieces, and another text through cross-attention where the model has one."""
    import tiny
    import torch

    ids = tiny.inputs(batch=2, length=9, padding=None)["input_ids"]
    given = {}
    states = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    if model.config.add_cross_attention:
        given = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
    with torch.no_grad():
        whole = model(ids, **given, use_cache=False).last_hidden_state
        outputs = [model(ids[:, :4], **given, use_cache=True)]
        for start, stop in ((4, 5), (5, 9)):
            kept = {tiny.CACHE: outputs[-1][tiny.CACHE]}
            assert kept[tiny.CACHE].get_seq_length() == start
            outputs.append(model(ids[:, start:stop], **given, **kept, use_cache=True))
        pieces = torch.cat([output.last_hidden_state for output in outputs], dim=1)
        torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-4)
        if given:
            masked = given | {"encoder_hidden_states": torch.where(mask.bool()[..., None], states, 9.0)}
            assert torch.equal(model(ids, **masked, use_cache=False).last_hidden_state, whole)
            other = model(ids, **given | {"encoder_hidden_states": -states}, use_cache=False).last_hidden_state
            assert (other - whole).abs().max() > 1e-2
    yield f"{name} whole", whole
    yield f"{name} pieces", pieces


def generated():
    """What `generate` writes with a cache and without one."""
    import tiny
    import torch

    for family, head in (("bert", "LMHeadModel"), ("roberta", "ForCausalLM")):
        for scheme in SCHEMES:
            model = tiny.build(scheme, family, head, is_decoder=True)
            ids = tiny.inputs(batch=2, length=5, padding=None)["input_ids"]
            texts = [
                model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=use_cache, eos_token_id=None)
                for use_cache in (True, False)
            ]
            assert torch.equal(*texts) and texts[0].shape == (2, 9)
            yield f"{family} {scheme}", texts[0]


def unpadded():
    """Stock models with `hf_posenc.unpad`, called as modules, and past their hooks as sentence-transformers does."""
    import stock_models
    import tiny
    import torch
    from transformers import AutoModel

    import hf_posenc

    configs = {family: tiny.stock_config(family) for family in tiny.STOCK_CONFIGS}
    configs |= {case: stock_models.config(case) for case in ("v1", "v3")}
    for name, config in configs.items():
        torch.manual_seed(0)
        model = AutoModel.from_config(config).eval()
        inputs = padded_inputs(name if name in tiny.STOCK_CONFIGS else "bert")
        mask = inputs["attention_mask"].bool()
        with torch.no_grad():
            expected = model(**inputs).last_hidden_state
            assert hf_posenc.unpad(model) == 1
            called, direct = model(**inputs).last_hidden_state, model.forward(**inputs).last_hidden_state
        for found in (called, direct) if name not in ("v1", "v3") else (called,):
            assert not found[~mask].any()
        for found in (called, direct):
            torch.testing.assert_close(found[mask], expected[mask], rtol=0, atol=1e-4)
        yield f"{name} called", called
        yield f"{name} direct", direct


def stock_attention():
    """Stock DeBERTa and MPNet with this package's attention."""
    import stock_models
    import torch

    import hf_posenc
    from hf_posenc.integrations.stock_attention import attention

    calls, attend = [], attention.self_attend

    def counted(*arguments):
        calls.append(arguments[0])
        return attend(*arguments)

    for family in hf_posenc.integrations.stock_attention.FAMILIES:
        family.self_attend = counted
    for case in (*stock_models.KINDS, "own projections, few buckets", "convolution"):
        model = stock_models.build(case)
        for length in (20, 300):
            inputs = stock_models.batch(length, "right")
            with torch.no_grad():
                expected = model(**inputs).last_hidden_state
                assert not calls
                assert hf_posenc.set_attn_implementation(model, "sdpa") == 1
                found = model(**inputs).last_hidden_state
                assert len(calls) == 2
                weights = model(**inputs, output_attentions=True).attentions
            hf_posenc.set_attn_implementation(model, "eager")
            calls.clear()
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
            yield f"{case} {length} eager", expected
            yield f"{case} {length} sdpa", found
            yield f"{case} {length} weights", torch.stack(weights)
