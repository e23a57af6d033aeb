"""What is pushed to the Hub loads anywhere, or fails loudly; a Hub on loopback stands in for the real one."""

import inspect
import itertools
import json
import re
import shutil
import time
from pathlib import Path

import huggingface_hub
import peft
import pytest
import test_custom_schemes
import tiny
import torch
import transformers
from fresh_process import run_fresh
from hub_server import LoopbackHub
from huggingface_hub import HfApi, ModelCard, constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from tiny import (
    FAMILIES,
    STOCK_CONFIGS,
    Sentences,
    aligned,
    build,
    fill_positions,
    heads_that_compute,
    inputs,
    schemes_beside,
    stock_config,
    variant_class,
)
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertModel,
    Trainer,
    TrainingArguments,
    pipeline,
)

import hf_posenc
from hf_posenc import train_positions, variants
from hf_posenc.checkpoint_code import code_files
from hf_posenc.custom_schemes import register_files
from hf_posenc.export.onnx import exporting as onnx
from hf_posenc.export.stock import export
from hf_posenc.hub.pushing import HubError, push
from hf_posenc.inspection import auto_class, load_config
from hf_posenc.modeling.schemes.table import SCHEMES
from hf_posenc.modeling.stock_interface import LOADS_MODULES_TO_SAVE


TOLERANCE = 1e-6
# The saved code computes by whole matrices, which sum in another order.
BY_SAVED_CODE = 1e-5
# Every scheme, with flags where there are some to forget.
KINDS = [
    ("absolute+t5", {"position_buckets": 8, "position_per_layer": True}),
    ("sinusoidal", {"position_combine": "gate", "position_every_layer": True}),
    ("none", {}),
    ("relative", {"position_max_distance": 3}),
    ("relative_key", {}),
    ("relative_key_query", {}),
    ("transformer_xl", {"position_base": 500.0}),
    ("tupe+t5", {}),
    ("absolute+deberta", {"position_norm": True}),
    ("absolute+rope", {"position_rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("alibi", {}),
]
KINDS += [(name, {}) for name in schemes_beside(scheme for scheme, _ in KINDS)]
# Every head of BERT, and of every other family the base model and one head, with the schemes in turn.
PUSHED = [
    (family, stock.__name__.removeprefix(STOCK_CONFIGS[family].__name__.removesuffix("Config")), *kind)
    for (family, stock), kind in zip(
        [
            (family, stock)
            for family in FAMILIES
            for stock in heads_that_compute(family)
            if family == "bert" or stock.__name__.endswith(("Model", "ForTokenClassification"))
        ],
        itertools.cycle(KINDS),
    )
]
TEXT = "Where is the second word of this sentence?"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub that the client in this process talks to, and is `me` for."""
    with LoopbackHub() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", hub.token)
        patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
        patch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # older ones keep no client
        disable_progress_bars()
        yield hub
        enable_progress_bars()


@pytest.fixture
def broken(hub, monkeypatch):
    """The same Hub, for tests that break it; the client does not wait before it tries again."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    yield hub
    hub.faults.clear()


@torch.no_grad()
def outputs(model, **batch) -> list[torch.Tensor]:
    """All tensors that a model returns."""
    values = aligned(model).eval()(**batch, use_cache=False).to_tuple()
    return [value for value in values if isinstance(value, torch.Tensor)]


def error(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    assert len(first) == len(second) > 0
    return max((a - b).abs().max().item() for a, b in zip(first, second))


def classifier(scheme: str = "absolute+t5", seed: int = 0, **overrides):
    return build(scheme, head="ForSequenceClassification", seed=seed, **overrides)


def test_every_scheme_family_and_head_is_pushed():
    assert {name for *_, scheme, _ in PUSHED for name in scheme.split("+")} == {*SCHEMES}
    assert {variant_class(family, head) for family, head, *_ in PUSHED} >= {
        *(variant_class(family) for family in FAMILIES),
        *(variants.VARIANT_MODELS[stock] for stock in heads_that_compute("bert")),
    }
    assert len(PUSHED) >= len(heads_that_compute("bert")) + 2 * (len(FAMILIES) - 1)


@pytest.fixture(scope="module")
def pushed(hub) -> list[tuple[str, str, dict, list[torch.Tensor]]]:
    """Repository, Auto class, inputs and outputs of every entry of PUSHED, after `push_to_hub`."""
    entries = []
    for family, head, scheme, flags in PUSHED:
        model = build(scheme, family, head=head, **flags)
        repo = f"me/{type(model).__name__}"
        model.push_to_hub(repo)
        batch = inputs(family=family)
        if head == "ForMultipleChoice":
            batch = {name: value[None] for name, value in batch.items()}
        entries.append((repo, auto_class(model.config), batch, outputs(model, **batch)))
        # A scheme that got lost would be seen.
        other = build("absolute" if scheme == "none" else "none", family, head=head)
        other.load_state_dict(model.state_dict(), strict=False)
        assert error(outputs(other, **batch), entries[-1][-1]) > 100 * TOLERANCE, repo
    return entries


@pytest.mark.slow
def test_push_to_hub_leaves_the_import_closure_of_the_family_and_nothing_more(hub, pushed):
    for (repo, *_), (family, _, scheme, _) in zip(pushed, PUSHED, strict=True):
        files = hub.repositories[repo].files()
        config = FAMILIES[family](position_scheme=scheme)
        code = {name: text.encode() for name, text in code_files(config).items()}
        assert {name: content for name, content in files.items() if name.endswith(".py")} == code
        others = files.keys() - code.keys() - {"generation_config.json"}
        assert others == {"config.json", "model.safetensors", "README.md"}
        auto_map = json.loads(files["config.json"])["auto_map"]
        assert auto_map.keys() == {"AutoConfig", *FAMILIES[family].auto_classes}


@pytest.mark.slow
def test_with_the_plugin_auto_classes_load_what_was_pushed_without_a_flag(hub, pushed):
    for repo, auto, batch, expected in pushed:
        model = getattr(transformers, auto).from_pretrained(repo)
        assert type(model) is getattr(hf_posenc, repo.removeprefix("me/"))
        assert error(outputs(model, **batch), expected) <= TOLERANCE


@pytest.fixture(scope="module")
def others(hub, tmp_path_factory, minilm) -> list[tuple[str, str, dict, dict, list[torch.Tensor]]]:
    """More that was pushed: repository, Auto class, keywords to load it with, inputs and outputs."""
    entries, batch = [], inputs()
    folder = tmp_path_factory.mktemp("others")

    def add(repo: str, model, auto: str = "AutoModelForSequenceClassification", **keywords) -> None:
        entries.append((repo, auto, keywords, batch, outputs(model, **batch)))

    shards = classifier("absolute+deberta")
    shards.push_to_hub("me/shards", max_shard_size="20KB")
    assert sum(name.endswith(".safetensors") for name in hub.repositories["me/shards"].files()) > 2
    add("me/shards", shards)

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    spoken = classifier("absolute+deberta", vocab_size=len(tokenizer))
    spoken.push_to_hub("me/tokenizer")
    tokenizer.push_to_hub("me/tokenizer")
    add("me/tokenizer", spoken)

    first, second = classifier(seed=1), classifier("rope", seed=2)
    first.push_to_hub("me/twice")
    sha = hub.repositories["me/twice"].sha()
    second.push_to_hub("me/twice")
    add("me/twice", first, revision=sha)
    add("me/twice", second)
    branch = classifier("alibi", seed=3)
    branch.push_to_hub("me/twice", revision="other")
    add("me/twice", branch, revision="other")

    arguments = {"report_to": "none", "use_cpu": True, "max_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    settings = TrainingArguments(str(folder / "trained"), hub_model_id="me/trained", **arguments)
    trainer = Trainer(classifier("tupe"), settings, train_dataset=Sentences(), processing_class=tokenizer)
    trainer.train()
    trainer.push_to_hub()
    add("me/trained", trainer.model)

    saved = classifier("sinusoidal")
    saved.save_pretrained(folder / "saved")
    assert push(folder / "saved", "me/saved").startswith(f"{hub.url}/me/saved/commit/")
    add("me/saved", saved)

    saved.save_pretrained(str(folder / "me-by-save"), push_to_hub=True, repo_id="me/by-save")
    add("me/by-save", saved)

    adapted = get_peft_model(
        AutoModelForSequenceClassification.from_pretrained("me/shards"), LoraConfig(task_type="SEQ_CLS")
    )
    train_positions(adapted)
    fill_positions(adapted, seed=5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    adapted.push_to_hub("me/adapter")
    assert (
        json.loads(hub.repositories["me/adapter"].files()["adapter_config.json"])["base_model_name_or_path"]
        == "me/shards"
    )
    add("me/adapter", adapted)
    for entry, another in itertools.combinations(entries, 2):
        same = {entry[0], another[0]} == {"me/saved", "me/by-save"}
        assert same or error(entry[-1], another[-1]) > 100 * TOLERANCE, (entry[0], another[0])
    return entries


@pytest.mark.slow
def test_with_the_plugin_shards_adapters_branches_and_what_a_trainer_pushed_load(others):
    for repo, auto, keywords, batch, expected in others:
        opens = getattr(transformers, auto)
        if repo == "me/adapter" and Version(transformers.__version__) < Version(LOADS_MODULES_TO_SAVE):
            # AutoModel does not load there what is in an adapter's modules_to_save, of any model.
            with pytest.raises(ImportError, match=LOADS_MODULES_TO_SAVE):
                opens.from_pretrained(repo, **keywords)
            opens, keywords = getattr(peft, auto.replace("Auto", "AutoPeft")), {}
        model = opens.from_pretrained(repo, **keywords)
        assert error(outputs(model, **batch), expected) <= TOLERANCE, (repo, keywords)


PULL = """
import os
os.environ.update({environment!r})
import torch, transformers
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer, pipeline
torch.set_num_threads(1)

{aligned}

def outputs(model, **batch):
    with torch.no_grad():
        values = aligned(model).eval()(**batch, use_cache=False).to_tuple()
    return [value for value in values if isinstance(value, torch.Tensor)]

pushed, others = torch.load({job!r})
refused = 0
for repo in {refused!r}:
    for auto in (AutoConfig, AutoModel):
        for keywords in ({{}}, {{"trust_remote_code": False}}):
            try:
                auto.from_pretrained(repo, **keywords)
            except ValueError as error:
                assert "trust_remote_code=True" in str(error), error
                refused += 1

results = []
for repo, auto, keywords, batch in pushed + others:
    model = getattr(transformers, auto).from_pretrained(repo, trust_remote_code=True, **keywords)
    results.append((type(model).__module__.split(".")[0], outputs(model, **batch)))
bases = [AutoModel.from_pretrained(repo, trust_remote_code=True) for repo, *_ in pushed]
classify = pipeline("text-classification", model="me/tokenizer", trust_remote_code=True)
torch.save(
    {{
        "refused": refused,
        "results": results,
        "bases": [(type(base).__name__, outputs(base, **others[0][3])[0]) for base in bases],
        "scores": classify({text!r}, top_k=None),
        "tokens": AutoTokenizer.from_pretrained("me/tokenizer")({text!r})["input_ids"],
    }},
    {result!r},
)
"""


@pytest.mark.slow
def test_without_the_plugin_what_was_pushed_is_refused_or_with_trust_computes_the_same(hub, pushed, others, tmp_path):
    """... by its own Auto class and by AutoModel; with `pipeline` and AutoTokenizer."""
    environment = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": "",  # a stranger
    }
    assert {family for family, *_ in PUSHED} == {*FAMILIES}
    assert {name for *_, scheme, _ in PUSHED for name in scheme.split("+")} == {*SCHEMES}
    assert "AutoModelForSequenceClassification" in {auto for _, auto, *_ in pushed}
    torch.save(
        ([(repo, auto, {}, batch) for repo, auto, batch, _ in pushed], [entry[:4] for entry in others]),
        tmp_path / "job.pt",
    )
    refused = [f"me/{variant_class(family).__name__}" for family in FAMILIES]
    names = {"job": str(tmp_path / "job.pt"), "result": str(tmp_path / "result.pt"), "text": TEXT, "refused": refused}
    names["aligned"] = inspect.getsource(aligned)
    run_fresh(PULL.format(environment=environment, **names), tmp_path / "modules", plugin=False)
    got = torch.load(tmp_path / "result.pt")

    assert got["refused"] == 4 * len(FAMILIES)
    expected = [entry[-1] for entry in pushed + others]
    for (module, values), wanted, entry in zip(got["results"], expected, pushed + others, strict=True):
        # An adapter is put into the variant, which is what comes back.
        assert module == "transformers_modules", entry[0]
        assert error(values, wanted) <= BY_SAVED_CODE, entry[0]

    for (repo, *_), (name, values) in zip(pushed, got["bases"], strict=True):
        base = AutoModel.from_pretrained(repo)
        assert type(base).__name__ == name
        assert error(outputs(base, **others[0][3])[:1], [values]) <= BY_SAVED_CODE, repo

    ours = pipeline("text-classification", model="me/tokenizer")(TEXT, top_k=None)
    assert [score["label"] for score in got["scores"]] == [score["label"] for score in ours]
    assert max(abs(a["score"] - b["score"]) for a, b in zip(got["scores"], ours)) <= BY_SAVED_CODE
    assert got["tokens"] == AutoTokenizer.from_pretrained("me/tokenizer")(TEXT)["input_ids"]


PULL_EXPORTED = """
import json, os, sys
os.environ.update({environment!r})
from transformers import AutoModelForSequenceClassification, pipeline
found = {{}}
for repo, revision in {revisions!r}.items():
    classify = pipeline("text-classification", model=repo, revision=revision)
    scores = classify({text!r}, top_k=None)
    found[repo] = [type(classify.model).__module__, {{score["label"]: score["score"] for score in scores}}]
assert sys.modules.get("hf_posenc") is None
print("FOUND", json.dumps(found))
"""


@pytest.mark.slow
def test_exported_models_are_pulled_at_a_revision_without_code(hub, minilm, tmp_path):
    """As architectures of Transformers they need neither hf_posenc nor trust; a revision is what was there then."""
    tokenizer, expected, revisions = AutoTokenizer.from_pretrained(minilm), {}, {}
    for scheme, module in {"t5": "mpnet", "deberta": "deberta_v2", "rope": "jina_embeddings_v3"}.items():
        repo = f"me/exported-{scheme}"
        for seed in (1, 2):  # the second is pushed later
            model = classifier(scheme, seed=seed, vocab_size=len(tokenizer), hidden_act="gelu")
            model.save_pretrained(tmp_path / f"{scheme}-{seed}")
            tokenizer.save_pretrained(tmp_path / f"{scheme}-{seed}")
            export(tmp_path / f"{scheme}-{seed}", tmp_path / f"exported-{scheme}-{seed}", single_text=True)
            push(tmp_path / f"exported-{scheme}-{seed}", repo)
            if seed == 1:
                revisions[repo] = hub.repositories[repo].sha()
                ours = pipeline("text-classification", model=model, tokenizer=tokenizer)(TEXT, top_k=None)
                expected[repo] = module, {score["label"]: score["score"] for score in ours}
        assert not any(name.endswith(".py") for name in hub.repositories[repo].files())
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
    environment["HF_HOME"] = str(tmp_path / "home")
    names = {"environment": environment, "revisions": revisions, "text": TEXT}
    said = run_fresh(PULL_EXPORTED.format(**names), tmp_path / "modules", plugin=False)
    found = json.loads(re.search(r"FOUND (.*)", said)[1])
    assert found.keys() == expected.keys()
    for repo, (module, scores) in expected.items():
        assert found[repo][0] == f"transformers.models.{module}.modeling_{module}"
        assert found[repo][1] == pytest.approx(scores, abs=1e-5), repo


class TestPush:
    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        classifier().save_pretrained(tmp_path / "variant")
        return tmp_path / "variant"

    def test_takes_what_belongs_to_a_model_and_nothing_else_of_a_run(self, hub, folder):
        for name in ("training_args.bin", "optimizer.pt", "pytorch_model.bin", "notes.py", "trainer_state.json"):
            (folder / name).write_bytes(b"-")
        for name in (
            "all_results.json",
            "eval_results.json",
            "train.jsonl",
            "predictions.txt",
            "notes.md",
            "run.json",
        ):
            (folder / name).write_text("{}")
        shutil.copytree(folder, folder / "checkpoint-2")
        for name in ("tokenizer.json", "vocab.txt", "results.json"):
            (folder / name).write_text("{}")
        config = AutoModel.from_pretrained(folder).config
        push(folder, "me/clean")
        code = {*code_files(config)}
        assert hub.repositories["me/clean"].files().keys() == {
            *code,
            *("config.json", "model.safetensors", "README.md", "tokenizer.json", "vocab.txt", "results.json"),
        }

    @pytest.mark.slow
    def test_adds_code_that_is_missing_and_a_card_that_claims_nothing(self, hub, folder):
        for path in folder.glob("*.py"):
            path.unlink()
        config = json.loads((folder / "config.json").read_text())
        del config["auto_map"]
        (folder / "config.json").write_text(json.dumps(config))
        push(folder, "me/completed")
        files = hub.repositories["me/completed"].files()
        assert {name for name in files if name.endswith(".py")} == {*code_files(classifier().config)}
        assert "AutoModel" in json.loads(files["config.json"])["auto_map"]
        card = ModelCard(files["README.md"].decode())
        assert card.data.eval_results is None and "Nothing was measured" in card.text
        assert [path.name for path in folder.iterdir()].count("README.md") == 0

    def test_the_file_of_a_registered_scheme_too(self, hub, tmp_path, schemes_of_the_package):
        file = tmp_path / "key_decay.py"
        file.write_text(test_custom_schemes.FILES["key_decay.py"], encoding="utf-8")
        register_files([file])
        model = build("absolute+key_decay", position_two_sided=False)
        model.save_pretrained(tmp_path / "saved")
        push(tmp_path / "saved", "me/own-scheme")
        model.push_to_hub("me/own-scheme-by-transformers")
        for repo in ("me/own-scheme", "me/own-scheme-by-transformers"):
            files = hub.repositories[repo].files()
            assert {name: files[name].decode() for name in files if name.endswith(".py")} == code_files(model.config)
            test_custom_schemes.forget()
            with pytest.raises(ValueError, match=f"{repo} has the custom position_scheme 'key_decay'.*key_decay.py"):
                AutoModel.from_pretrained(repo)
            loaded = AutoModel.from_pretrained(repo, trust_remote_code=True)
            assert error(outputs(loaded, **inputs()), outputs(model, **inputs())) < TOLERANCE

    def test_the_file_of_a_scheme_is_the_folder_s(self, hub, tmp_path, schemes_of_the_package):
        """... whatever is registered since: the weights belong to it."""
        file = tmp_path / "key_decay.py"
        file.write_text(test_custom_schemes.FILES["key_decay.py"], encoding="utf-8")
        register_files([file])
        model = build("absolute+key_decay")
        model.save_pretrained(tmp_path / "saved")
        file.write_text(file.read_text().replace("log1p", "sqrt"), encoding="utf-8")
        register_files([file])
        push(tmp_path / "saved", "me/scheme-of-the-folder")
        files = hub.repositories["me/scheme-of-the-folder"].files()
        for path in tmp_path.glob("saved/*.py"):
            assert files[path.name] == path.read_bytes(), path.name
        assert json.loads(files["config.json"]) == json.loads((tmp_path / "saved" / "config.json").read_text())
        test_custom_schemes.forget()
        loaded = AutoModel.from_pretrained("me/scheme-of-the-folder", trust_remote_code=True)
        assert error(outputs(loaded, **inputs()), outputs(model, **inputs())) < TOLERANCE

    def test_a_scheme_that_is_registered_from_another_file_is_said(self, hub, tmp_path, schemes_of_the_package):
        file = tmp_path / "key_decay.py"
        file.write_text(test_custom_schemes.FILES["key_decay.py"], encoding="utf-8")
        register_files([file])
        build("absolute+key_decay").save_pretrained(tmp_path / "saved")
        test_custom_schemes.forget()
        register_files([file.rename(tmp_path / "renamed.py")])
        with pytest.raises(
            ValueError, match="'key_decay' as key_decay.KeyDecay, but it is registered as renamed.KeyDecay"
        ):
            push(tmp_path / "saved", "me/renamed")
        assert "me/renamed" not in hub.repositories

    def test_keeps_the_card_that_is_there(self, hub, folder):
        (folder / "README.md").write_text("---\nlicense: mit\n---\nmine\n")
        push(folder, "me/mine")
        mine = (folder / "README.md").read_bytes()
        assert hub.repositories["me/mine"].files()["README.md"] == mine
        (folder / "README.md").unlink()
        fill_positions(classifier(), seed=8).save_pretrained(folder)
        push(folder, "me/mine")
        assert len(hub.repositories["me/mine"].commits) == 3
        assert hub.repositories["me/mine"].files()["README.md"] == mine

    @pytest.mark.slow
    def test_replaces_old_weights_and_code_and_leaves_everything_else(self, hub, folder, tmp_path):
        classifier(seed=9).push_to_hub("me/again")  # one file, which transformers would prefer to shards
        HfApi(endpoint=hub.url).upload_file(
            path_or_fileobj=b"<svg/>", path_in_repo="plots/positions.svg", repo_id="me/again"
        )
        model = classifier(seed=4)
        model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
        push(tmp_path / "shards", "me/again", message="shards")
        repository = hub.repositories["me/again"]
        assert repository.messages[-1] == "shards"
        assert "model.safetensors" not in repository.files() and "model.safetensors.index.json" in repository.files()
        assert repository.files()["plots/positions.svg"] == b"<svg/>"
        loaded = AutoModelForSequenceClassification.from_pretrained("me/again")
        assert error(outputs(loaded, **inputs()), outputs(model, **inputs())) <= TOLERANCE

    def test_refuses_weights_of_two_saves(self, hub, tmp_path):
        classifier(seed=9).save_pretrained(tmp_path)
        classifier(seed=4).save_pretrained(
            tmp_path, max_shard_size="20KB"
        )  # Transformers leaves the file, and loads it
        with pytest.raises(ValueError, match="model.safetensors, which Transformers loads, and shards"):
            push(tmp_path, "me/twice")
        assert "me/twice" not in hub.repositories
        (tmp_path / "model.safetensors").unlink()
        push(tmp_path, "me/twice")

    def test_shards_of_a_variant_come_with_their_index_and_go_with_it(self, hub, tmp_path):
        model = classifier(seed=4)
        model.save_pretrained(tmp_path)
        plain = {path.name for path in tmp_path.iterdir()}
        model.save_pretrained(tmp_path, variant="fp16", max_shard_size="20KB")
        push(tmp_path, "me/variant")
        index = "model.safetensors.index.fp16.json"
        assert index in hub.repositories["me/variant"].files()
        loaded = AutoModelForSequenceClassification.from_pretrained("me/variant", variant="fp16")
        assert error(outputs(loaded, **inputs()), outputs(model, **inputs())) <= TOLERANCE
        for path in tmp_path.iterdir():
            if path.name not in plain:
                path.unlink()
        push(tmp_path, "me/variant")
        assert not [name for name in hub.repositories["me/variant"].files() if "fp16" in name]

    def test_that_changes_nothing_makes_no_commit(self, hub, folder):
        """... so that it can be tried again where it is not known whether it arrived."""
        first = push(folder, "me/same")
        assert push(folder, "me/same") == first
        assert len(hub.repositories["me/same"].commits) == 2

    def test_makes_branches_and_private_repositories(self, hub, folder):
        push(folder, "me/branched", revision="trial", private=True)
        repository = hub.repositories["me/branched"]
        assert repository.private
        assert repository.files("main") == {} and "config.json" in repository.files("trial")

    @pytest.mark.slow
    def test_shares_an_adapter_whose_variant_is_on_the_hub(self, hub, folder, tmp_path):
        push(folder, "me/base")
        adapted = get_peft_model(AutoModelForSequenceClassification.from_pretrained("me/base"), LoraConfig())
        train_positions(adapted)
        fill_positions(adapted, seed=6)
        adapted.save_pretrained(tmp_path / "adapter")
        for name in ("training_args.bin", "all_results.json"):
            (tmp_path / "adapter" / name).write_text("{}")
        push(tmp_path / "adapter", "me/of-base")
        assert hub.repositories["me/of-base"].files().keys() == {
            *("adapter_config.json", "adapter_model.safetensors", "README.md"),
        }
        base = AutoModelForSequenceClassification.from_pretrained("me/base")
        again = PeftModel.from_pretrained(base, "me/of-base")
        assert error(outputs(again, **inputs()), outputs(adapted, **inputs())) <= TOLERANCE

    def test_sends_nothing_that_is_hidden(self, hub, folder):
        """As a Mac, git and notebooks leave beside files, and as a save that was cut off does."""
        for name in (".model.safetensors", "._tokenizer.json", ".env"):
            (folder / name).write_bytes(b"-")
        push(folder, "me/hidden")
        assert not [name for name in hub.repositories["me/hidden"].files() if name.startswith(".")]

    @pytest.mark.parametrize("name", ["README.md", "LICENSE", "tokenizer_config.json"])
    def test_sends_no_file_that_a_link_leads_to(self, name, hub, folder, tmp_path):
        (tmp_path / "outside").write_text("of somebody")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "outside")
        with pytest.raises(ValueError, match=f"{name} is a link that leads out of the folder"):
            push(folder, "me/linked-out")
        assert "me/linked-out" not in hub.repositories

    def test_sends_no_half_written_weights_beside_whole_ones(self, hub, folder):
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model-00001-of-00002.safetensors").write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match="model-00001-of-00002.safetensors is damaged"):
            push(folder, "me/half-beside")
        assert "me/half-beside" not in hub.repositories

    @pytest.mark.parametrize(
        "content", [None, {}, [], {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"x": 3}}]
    )
    def test_says_what_is_wrong_with_an_index(self, content, tmp_path):
        classifier().save_pretrained(tmp_path / "index", max_shard_size="20KB")
        index = tmp_path / "index/model.safetensors.index.json"
        index.write_text("{" if content is None else json.dumps(content))
        with pytest.raises(ValueError, match="index.json must name shards in the same folder"):
            push(tmp_path / "index", "me/index")

    def test_sends_no_index_of_shards_that_are_elsewhere(self, tmp_path):
        """They would not be sent."""
        classifier().save_pretrained(tmp_path / "index", max_shard_size="20KB")
        index = tmp_path / "index/model.safetensors.index.json"
        entries = json.loads(index.read_text())
        name, shard = next(iter(entries["weight_map"].items()))
        (tmp_path / "index/below").mkdir()
        shutil.copy(tmp_path / "index" / shard, tmp_path / "index/below/shard.safetensors")
        entries["weight_map"][name] = "below/shard.safetensors"
        index.write_text(json.dumps(entries))
        with pytest.raises(ValueError, match="index.json must name shards in the same folder"):
            push(tmp_path / "index", "me/index")

    def test_sends_no_shard_that_lacks_what_the_index_has_in_it(self, tmp_path):
        classifier().save_pretrained(tmp_path / "shards", max_shard_size="20KB")
        shard = next((tmp_path / "shards").glob("*-00002-*.safetensors"))
        save_file({"other": torch.zeros(1)}, shard, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"{shard.name} lacks .+, which model.safetensors.index.json lists there"):
            push(tmp_path / "shards", "me/shards")

    def test_a_config_of_wrong_types_is_said(self, folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"initializer_range": "x"}))
        with pytest.raises(ValueError, match="config.json has an invalid value .+initializer_range"):
            push(folder, "me/wrong-types")

    @pytest.mark.parametrize("content", ["[]", "3", '"x"', "[1]", "null"])
    def test_a_config_that_is_no_object_is_said(self, content, folder):
        (folder / "config.json").write_text(content)
        with pytest.raises((ValueError, OSError), match="config.json"):
            push(folder, "me/no-object")

    def test_is_loaded_where_an_adapter_was_before(self, hub, folder, tmp_path):
        push(folder, "me/was-adapter-base")
        base = AutoModelForSequenceClassification.from_pretrained("me/was-adapter-base")
        get_peft_model(base, LoraConfig()).save_pretrained(tmp_path / "adapter")
        push(tmp_path / "adapter", "me/was-adapter")
        push(folder, "me/was-adapter")
        assert (
            not {"adapter_config.json", "adapter_model.safetensors"}
            & hub.repositories["me/was-adapter"].files().keys()
        )
        loaded = AutoModelForSequenceClassification.from_pretrained("me/was-adapter")
        assert error(outputs(loaded, **inputs()), outputs(classifier(), **inputs())) <= TOLERANCE
        push(tmp_path / "adapter", "me/was-adapter")
        assert "config.json" not in hub.repositories["me/was-adapter"].files()

    def test_an_adapter_does_not_replace_its_own_base(self, hub, folder, tmp_path):
        push(folder, "me/own-base")
        base = AutoModelForSequenceClassification.from_pretrained("me/own-base")
        get_peft_model(base, LoraConfig()).save_pretrained(tmp_path / "adapter")
        before = hub.repositories["me/own-base"].files()
        with pytest.raises(
            ValueError, match="me/own-base is the adapter's base model, whose weights the adapter would replace"
        ):
            push(tmp_path / "adapter", "me/own-base")
        push(tmp_path / "adapter", "me/own-base", revision="adapter")
        assert hub.repositories["me/own-base"].files() == before

    @pytest.mark.parametrize("base", ["./base", "/nowhere/base", "~/base", "me/base\n", 3, ["me/base"], "\0"])
    def test_a_base_that_cannot_be_on_the_hub_is_said(self, base, tmp_path):
        get_peft_model(classifier(), LoraConfig()).save_pretrained(tmp_path / "adapter")
        config = tmp_path / "adapter/adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": base}))
        with pytest.raises(ValueError, match="the adapter's base model, .+, is not on the Hub"):
            push(tmp_path / "adapter", "me/adapter-of-nothing")

    def test_what_is_to_be_private_is_not_sent_to_a_public_repository(self, hub, folder):
        HfApi(endpoint=hub.url).create_repo("me/public")
        with pytest.raises(ValueError, match="me/public is already public"):
            push(folder, "me/public", private=True)
        assert hub.repositories["me/public"].files() == {}
        push(folder, "me/private", private=True)
        push(folder, "me/private", private=True)

    def test_a_gitignore_on_the_hub_keeps_nothing_out(self, hub, folder):
        HfApi(endpoint=hub.url).create_repo("me/ignoring")
        HfApi(endpoint=hub.url).upload_file(
            path_or_fileobj=b"*.safetensors\n", path_in_repo=".gitignore", repo_id="me/ignoring"
        )
        push(folder, "me/ignoring")
        assert {"model.safetensors", ".gitignore"} <= hub.repositories["me/ignoring"].files().keys()

    @pytest.mark.parametrize("name", ["nothing", "stock", "pickled", "cut", "lost shard", "local base", "card"])
    def test_sends_nothing_of_what_others_could_not_load(self, name, hub, folder, tmp_path):
        if name == "nothing":
            shutil.rmtree(folder)
        elif name == "stock":
            BertModel(stock_config()).save_pretrained(folder)
        elif name == "pickled":
            torch.save({}, folder / "pytorch_model.bin")
            (folder / "model.safetensors").unlink()
        elif name == "cut":
            data = (folder / "model.safetensors").read_bytes()
            (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
        elif name == "lost shard":
            classifier().save_pretrained(folder, max_shard_size="20KB")
            (folder / "model.safetensors").unlink(missing_ok=True)
            sorted(folder.glob("model-*.safetensors"))[-1].unlink()
        elif name == "local base":
            adapted = get_peft_model(AutoModelForSequenceClassification.from_pretrained(folder), LoraConfig())
            shutil.rmtree(folder)
            adapted.save_pretrained(folder)
        elif name == "card":
            (folder / "README.md").write_text("---\nbase_model: a folder/of/mine\n---\n")
        said = {
            "nothing": "no folder",
            "stock": "push it with push_to_hub",
            "pickled": "writes safetensors",
            "cut": "damaged",
            "lost shard": "is missing",
            "local base": "push the base model first",
            "card": "base_model",
        }
        repo = f"me/refused-{name.replace(' ', '-')}"
        with pytest.raises((ValueError, OSError), match=said[name]):
            push(folder, repo)
        repository = hub.repositories.get(repo)
        assert repository is None or repository.files() == {}
        assert (repository is None) == (name != "card")


TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
DENSE = {"path": "2_Dense", "type": "sentence_transformers.base.modules.dense.Dense"}
NORMALIZE = {"path": "3_Normalize", "type": "sentence_transformers.models.Normalize"}


def write_modules(folder: Path, *modules: dict) -> None:
    """`modules.json` as sentence-transformers writes it."""
    entries = [{"idx": index, "name": str(index), **module} for index, module in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(entries))


def write_dense(folder: Path, name: str = "2_Dense", seed: int = 0) -> None:
    """The sub-folder of a Dense module."""
    (folder / name).mkdir()
    (folder / name / "config.json").write_text('{"in_features": 32, "out_features": 8, "bias": true}')
    generator = torch.Generator().manual_seed(seed)
    weights = {"linear.weight": torch.randn(8, 32, generator=generator), "linear.bias": torch.zeros(8)}
    save_file(weights, folder / name / "model.safetensors")


@pytest.mark.slow
class TestFoldersOfSentenceTransformers:
    @pytest.fixture
    def folder(self, tmp_path, minilm) -> Path:
        """A variant in the place of MiniLM, with a Dense module between pooling and normalization; Normalize saves nothing."""
        folder = tmp_path / "sentences"
        build("absolute+t5").save_pretrained(folder)
        for name in ("config_sentence_transformers.json", "sentence_bert_config.json", "tokenizer.json", "vocab.txt"):
            shutil.copy(Path(minilm) / name, folder)
        shutil.copytree(Path(minilm) / "1_Pooling", folder / "1_Pooling")
        write_dense(folder)
        write_modules(folder, TRANSFORMER, POOLING, DENSE, NORMALIZE)
        return folder

    def test_arrive_whole_in_one_commit_and_without_what_else_a_run_leaves(self, hub, folder, tmp_path):
        for name in (
            "checkpoint-2/1_Pooling/config.json",
            "eval/similarity.csv",
            "notes/config.json",
            "all_results.json",
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
        (folder / "2_Dense/pytorch_model.bin").write_bytes(b"-")  # beside safetensors, which are loaded
        (folder / "2_Dense/.DS_Store").write_bytes(b"-")
        push(folder, "me/sentences")
        pulled = Path(snapshot_download("me/sentences", cache_dir=tmp_path / "cache"))
        got = {path.relative_to(pulled).as_posix() for path in pulled.rglob("*") if path.is_file()}
        modules = {"modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
        settings = {"config.json", "config_sentence_transformers.json", "sentence_bert_config.json"}
        code = {*code_files(AutoModel.from_pretrained(folder).config)}
        others = {"model.safetensors", "tokenizer.json", "vocab.txt", "README.md"}
        assert got == modules | settings | code | others
        for name in got - {"README.md"}:
            assert (pulled / name).read_bytes() == (folder / name).read_bytes(), name
        assert len(hub.repositories["me/sentences"].commits) == 2  # the first is the empty repository
        loaded = AutoModel.from_pretrained(pulled)
        assert error(outputs(loaded, **inputs()), outputs(build("absolute+t5"), **inputs())) <= TOLERANCE
        card = ModelCard.load(pulled / "README.md")
        assert card.data.library_name == "sentence-transformers" and card.data.pipeline_tag == "sentence-similarity"

    def test_hidden_files_in_the_folders_of_modules_stay_here(self, hub, folder):
        for name in ("1_Pooling/.secret.json", "1_Pooling/.ipynb_checkpoints/config.json", "2_Dense/.old/x.bin"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("{}")
        push(folder, "me/hidden-sentences")
        assert not [name for name in hub.repositories["me/hidden-sentences"].files() if "/." in name]

    @pytest.mark.slow
    def test_the_very_files_of_minilm_are_what_is_sent(self, hub, folder, minilm):
        for path in Path(minilm).rglob("*"):
            if path.is_file() and path.name not in ("config.json", "model.safetensors"):
                shutil.copy(path, folder / path.relative_to(minilm))
        push(folder, "me/minilm")
        files = hub.repositories["me/minilm"].files()
        assert "1_Pooling/config.json" in files and not {".gitattributes", "data_config.json"} & files.keys()
        assert files["README.md"] == (Path(minilm) / "README.md").read_bytes()

    @pytest.mark.slow
    def test_modules_inside_modules_come_along(self, hub, folder):
        """As those of a Router, whose sub-folders its own settings name."""
        write_modules(folder, TRANSFORMER, POOLING, {**DENSE, "path": "2_Router", "type": "x.Router"})
        (folder / "2_Dense").rename(folder / "query_0_Dense")
        (folder / "2_Router").mkdir()
        (folder / "2_Router/router_config.json").write_text("{}")
        (folder / "query_0_Dense").rename(folder / "2_Router/query_0_Dense")
        push(folder, "me/router")
        assert {"2_Router/router_config.json", "2_Router/query_0_Dense/model.safetensors"} <= hub.repositories[
            "me/router"
        ].files().keys()

    @pytest.mark.slow
    def test_what_older_modules_left_in_their_folders_is_removed(self, hub, folder):
        push(folder, "me/changed")
        for name in ("2_Dense/pytorch_model.bin", "plots/1_Pooling.json"):
            HfApi(endpoint=hub.url).upload_file(path_or_fileobj=b"-", path_in_repo=name, repo_id="me/changed")
        push(folder, "me/changed")
        assert "2_Dense/pytorch_model.bin" not in hub.repositories["me/changed"].files()
        shutil.rmtree(folder / "2_Dense")
        write_dense(folder, "1_Dense", seed=1)
        write_modules(folder, TRANSFORMER, {**DENSE, "path": "1_Dense"})
        push(folder, "me/changed")
        files = hub.repositories["me/changed"].files()
        assert {name for name in files if "/" in name} == {
            *("1_Dense/config.json", "1_Dense/model.safetensors", "plots/1_Pooling.json"),
        }

    @pytest.mark.slow
    def test_a_variant_alone_leaves_the_modules_that_are_there(self, hub, folder, tmp_path):
        push(folder, "me/alone")
        build("absolute+t5", seed=1).save_pretrained(tmp_path / "alone")
        push(tmp_path / "alone", "me/alone")
        assert {"modules.json", "2_Dense/model.safetensors"} <= hub.repositories["me/alone"].files().keys()

    @pytest.mark.slow
    def test_a_broken_list_of_modules_on_the_hub_is_replaced(self, hub, folder):
        api = HfApi(endpoint=hub.url)
        api.create_repo("me/broken-list")
        for name in ("modules.json", "2_Dense/old.json"):
            api.upload_file(path_or_fileobj=b"{", path_in_repo=name, repo_id="me/broken-list")
        push(folder, "me/broken-list")
        files = hub.repositories["me/broken-list"].files()
        assert files["modules.json"] == (folder / "modules.json").read_bytes() and "1_Pooling/config.json" in files
        assert "2_Dense/old.json" not in files

    @pytest.mark.slow
    def test_an_adapter_in_such_a_folder_has_its_modules_too(self, hub, folder, tmp_path):
        push(folder, "me/sentence-base")
        adapted = get_peft_model(AutoModel.from_pretrained("me/sentence-base"), LoraConfig())
        for path in [*folder.glob("*.py"), folder / "config.json", folder / "model.safetensors"]:
            path.unlink()
        adapted.save_pretrained(folder)
        push(folder, "me/sentence-adapter")
        files = hub.repositories["me/sentence-adapter"].files()
        assert {"adapter_config.json", "adapter_model.safetensors", "modules.json"} <= files.keys()
        assert {"1_Pooling/config.json", "2_Dense/model.safetensors"} <= files.keys() and "config.json" not in files

    @pytest.mark.parametrize(
        "name, said",
        [
            ("missing folder", "names 1_Pooling, which does not exist"),
            ("empty folder", "1_Pooling has no settings"),
            ("up", "'../outside', which leads out of the folder"),
            ("up and down", "leads out of the folder"),
            ("absolute", "outside', which leads out of the folder"),
            ("link", "'1_Pooling', which leads out of the folder"),
            ("pickle", "pytorch_model.bin is a pickle, which is not uploaded: .+ writes safetensors"),
            ("no weights", "2_Dense/model.safetensors is missing"),
            ("damaged", "2_Dense/model.safetensors is damaged"),
            ("transformer below", "0_Transformer.+save it again, which puts it into the folder itself"),
            ("code", "names the module mine.Pooling, whose code is mine.py"),
            ("no JSON", "modules.json is not JSON"),
            ("no list", "modules.json must be a list of modules"),
            ("mapping", "modules.json must be a list of modules"),
            ("empty list", "modules.json must be a list of modules"),
            ("no path", "modules.json must be a list of modules"),
        ],
    )
    def test_sends_nothing_of_what_others_could_not_load(self, name, said, hub, folder, tmp_path):
        shutil.copytree(folder / "1_Pooling", tmp_path / "outside")
        outside = {"up": "../outside", "up and down": "1_Pooling/../../outside", "absolute": str(tmp_path / "outside")}
        if name in ("missing folder", "empty folder", "link"):
            shutil.rmtree(folder / "1_Pooling")
        if name == "empty folder":
            (folder / "1_Pooling").mkdir()
        elif name == "link":
            (folder / "1_Pooling").symlink_to(tmp_path / "outside")
        elif name in outside:
            write_modules(folder, TRANSFORMER, {**POOLING, "path": outside[name]})
        elif name in ("pickle", "no weights"):
            (folder / "2_Dense/model.safetensors").unlink()
        elif name == "damaged":
            data = (folder / "2_Dense/model.safetensors").read_bytes()
            (folder / "2_Dense/model.safetensors").write_bytes(data[: len(data) // 2])
        elif name == "transformer below":
            build("absolute+t5").save_pretrained(folder / "0_Transformer")
            (folder / "config.json").unlink()
            (folder / "model.safetensors").unlink()
            write_modules(folder, {**TRANSFORMER, "path": "0_Transformer"}, POOLING)
        elif name == "code":
            (folder / "mine.py").write_text("class Pooling: ...")
            write_modules(folder, TRANSFORMER, {**POOLING, "type": "mine.Pooling"})
        elif name == "no JSON":
            (folder / "modules.json").write_text("[")
        elif name == "no list":
            (folder / "modules.json").write_text("3")
        elif name in ("mapping", "empty list"):
            (folder / "modules.json").write_text("{}" if name == "mapping" else "[]")
        elif name == "no path":
            write_modules(folder, TRANSFORMER, {"type": POOLING["type"]})
        if name == "pickle":
            torch.save({}, folder / "2_Dense/pytorch_model.bin")
        repo = f"me/refused-sentences-{name.replace(' ', '-')}"
        with pytest.raises((ValueError, OSError), match=said) as raised:
            push(folder, repo)
        assert "\n" not in str(raised.value) and repo not in hub.repositories


def test_a_head_that_the_weights_on_the_hub_lack(hub, tmp_path, monkeypatch):
    """Configs of base models name one: the weights decide, once they are here."""
    for kind, model, head in (
        ("stock", BertModel(stock_config()), "BertForMaskedLM"),
        ("variant", build("absolute+t5"), "PosencBertForMaskedLM"),
    ):
        repo = f"me/headless-{kind}"
        model.push_to_hub(repo)
        entries = json.loads(hub.repositories[repo].files()["config.json"]) | {"architectures": [head]}
        HfApi(endpoint=hub.url).upload_file(
            path_or_fileobj=json.dumps(entries).encode(), path_in_repo="config.json", repo_id=repo
        )
        assert load_config(repo).architectures == [head], "nothing is fetched to look at it"
        monkeypatch.setattr(onnx, "export_model", lambda model, out: model)
        assert type(onnx.export(repo, tmp_path / "model.onnx")).__name__ == type(model).__name__
        assert load_config(repo).architectures == [type(model).__name__]


@pytest.mark.slow
class TestWhatGoesWrongWhilePushing:
    @pytest.fixture
    def model(self, hub):
        """A model of its own for every test: the Hub takes no file twice."""
        return classifier(seed=100 + len(hub.requests))

    @pytest.fixture
    def folder(self, model, tmp_path) -> Path:
        model.save_pretrained(tmp_path / "variant")
        return tmp_path / "variant"

    @tiny.cross(
        status=[None, 500],
        request_that_fails=[
            ("PUT", "/lfs/"),
            ("POST", "/commit/"),
            ("POST", "/preupload/"),
            ("POST", "/objects/batch"),
        ],
        strength=1,
    )
    def test_nothing_is_half_written_and_a_retry_succeeds(self, request_that_fails, status, broken, model, folder):
        repo = f"me/{'-'.join(request_that_fails).replace('/', '')}-{status}"
        broken.fail(*request_that_fails, status=status)
        with pytest.raises(HubError, match=f"pushing {folder} to {repo} failed: .+; try again") as raised:
            push(folder, repo)
        assert "\n" not in str(raised.value)
        assert broken.repositories[repo].files() == {} and len(broken.repositories[repo].commits) == 1
        broken.faults.clear()
        push(folder, repo)
        loaded = AutoModelForSequenceClassification.from_pretrained(repo)
        assert error(outputs(loaded, **inputs()), outputs(model, **inputs())) <= TOLERANCE

    @pytest.mark.parametrize(
        "status, said",
        [(200, "does not answer like a Hub .+; try again"), (412, "somebody else pushed in the meantime")],
    )
    @pytest.mark.parametrize("path", ["/repos/create", "/preupload/", "/commit/"])
    def test_nonsense_and_conflicts_are_said_in_a_line(self, path, status, said, broken, folder):
        broken.fail("POST", path, status=status)
        with pytest.raises((HubError, ValueError)) as raised:
            push(folder, f"me/odd{path.replace('/', '-')}{status}")
        assert "\n" not in str(raised.value)
        if path != "/preupload/" or status != 200:  # the client says itself what is wrong with that
            assert isinstance(raised.value, HubError) and re.search(said, str(raised.value))

    def test_of_two_pushes_at_once_one_is_refused(self, broken, model, folder, tmp_path, monkeypatch):
        """... and what is there is one of them, and no mixture."""
        model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
        push(folder, "me/race")
        fill_positions(model, seed=1).save_pretrained(folder)
        commit = HfApi.create_commit

        def late(self, *arguments, **keywords):
            monkeypatch.setattr(HfApi, "create_commit", commit)
            push(tmp_path / "shards", "me/race")
            return commit(self, *arguments, **keywords)

        monkeypatch.setattr(HfApi, "create_commit", late)
        with pytest.raises(HubError, match=r"\(412\); somebody else pushed in the meantime"):
            push(folder, "me/race")
        files = broken.repositories["me/race"].files()
        assert "model.safetensors" not in files and "model.safetensors.index.json" in files
        push(folder, "me/race")
        assert "model.safetensors" in broken.repositories["me/race"].files()

    def test_a_file_that_changes_meanwhile_is_sent_as_it_was(self, broken, folder, monkeypatch):
        (folder / "results.json").write_text("{}")
        create = HfApi.create_repo

        def late(self, *arguments, **keywords):
            (folder / "results.json").write_text('{"other": 1}')
            return create(self, *arguments, **keywords)

        monkeypatch.setattr(HfApi, "create_repo", late)
        push(folder, "me/changing")
        assert broken.repositories["me/changing"].files()["results.json"] == b"{}"

    def test_a_failed_update_leaves_what_was_there(self, broken, model, folder):
        push(folder, "me/updated")
        before = dict(broken.repositories["me/updated"].files())
        fill_positions(model, seed=1).save_pretrained(folder)
        broken.fail("PUT", "/lfs/")
        with pytest.raises(HubError, match="try again"):
            push(folder, "me/updated")
        assert broken.repositories["me/updated"].files() == before

    @pytest.mark.parametrize("token", ["hf_wrong", None])
    def test_a_token_that_is_wrong_or_missing_is_said(self, token, broken, folder, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", token or "")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
        with pytest.raises(HubError, match=r"\(401\); log in with `hf auth login`"):
            push(folder, f"me/{token}")
        assert f"me/{token}" not in broken.repositories
        with pytest.raises((HfHubHTTPError, OSError)):
            HfApi(endpoint=broken.url).whoami()

    def test_somebody_else_s_name_is_refused(self, hub, folder):
        with pytest.raises(HubError, match=r"rights to write to you/model \(403\)"):
            push(folder, "you/model")

    def test_a_repository_that_exists_can_be_left_alone(self, hub, folder):
        push(folder, "me/exists")
        commits = [*hub.repositories["me/exists"].commits]
        with pytest.raises(HubError, match=r"already created this model repo \(409\); it already exists"):
            push(folder, "me/exists", exist_ok=False)
        assert [*hub.repositories["me/exists"].commits] == commits

    def test_a_hub_that_is_not_reached_is_said(self, folder, broken):
        with LoopbackHub() as gone:
            pass
        with pytest.raises(HubError, match="refused"):
            push(folder, "me/unreached", api=HfApi(endpoint=gone.url, token="hf_x"))

    def test_a_name_that_no_repository_can_have_is_refused(self, hub, folder):
        with pytest.raises(ValueError, match="(?i)repo id"):
            push(folder, "me/../up")


@pytest.mark.slow
class TestWhatGoesWrongWhilePulling:
    @pytest.fixture
    def repo(self, hub) -> str:
        classifier().push_to_hub("me/pulled")
        return "me/pulled"

    @tiny.cross(path=["/lfs/", "config.json"], status=[None, 500], strength=1)
    def test_nothing_half_written_is_ever_used_and_a_retry_succeeds(self, path, status, broken, repo, tmp_path):
        broken.fail("GET", path, status=status)
        with pytest.raises(Exception) as raised:  # huggingface_hub raises its own, httpx's, or an OSError
            AutoModelForSequenceClassification.from_pretrained(repo, cache_dir=tmp_path)
        assert str(raised.value)
        whole = broken.repositories[repo].files()
        for file in tmp_path.rglob("snapshots/*/*"):
            assert file.read_bytes() == whole[file.name]
        assert not [*tmp_path.rglob("snapshots/*/model.safetensors")]
        broken.faults.clear()
        loaded = AutoModelForSequenceClassification.from_pretrained(repo, cache_dir=tmp_path)
        assert error(outputs(loaded, **inputs()), outputs(classifier(), **inputs())) <= TOLERANCE

    def test_a_download_that_was_cut_off_is_resumed(self, broken, repo, tmp_path):
        broken.fail("GET", "/lfs/", cut=5000, times=1)
        start = len(broken.requests)
        loaded = AutoModelForSequenceClassification.from_pretrained(repo, cache_dir=tmp_path)
        assert error(outputs(loaded, **inputs()), outputs(classifier(), **inputs())) <= TOLERANCE
        assert sum(path.startswith("/lfs/") for _, path in broken.requests[start:]) == 2

    @pytest.mark.parametrize("keywords", [{}, {"revision": "nowhere"}], ids=["repository", "revision"])
    def test_what_does_not_exist_is_said(self, keywords, hub, repo, tmp_path):
        name = repo if keywords else "me/never-pushed"
        with pytest.raises(OSError, match="is not a valid (model|git) identifier"):
            AutoModel.from_pretrained(name, cache_dir=tmp_path, **keywords)

    def test_a_private_repository_is_hidden_from_strangers(self, hub, tmp_path, monkeypatch):
        classifier().push_to_hub("me/secret", private=True)
        AutoModel.from_pretrained("me/secret", cache_dir=tmp_path / "me")
        monkeypatch.setenv("HF_TOKEN", "")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
        with pytest.raises(OSError, match="private repository"):
            AutoModel.from_pretrained("me/secret", cache_dir=tmp_path / "stranger")
