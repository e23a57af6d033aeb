"""Schemes from outside the package: registered, used, saved with their file, loaded with hf_posenc and without."""

import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import tiny
import torch
from fresh_process import ROOT, run_fresh
from tiny import build, fill_positions, inputs, stock_config
from transformers import AutoConfig, AutoModel, BertConfig, BertModel

import hf_posenc
import hf_posenc_cli as cli
from hf_posenc import analysis, custom_schemes, register_scheme, with_position_scheme
from hf_posenc.checkpoint_code import at_home, travelling
from hf_posenc.conversion.converting import conversion_options
from hf_posenc.conversion.start import start
from hf_posenc.custom_schemes import register_files
from hf_posenc.hub.cards import write_card
from hf_posenc.modeling.schemes import table as schemes
from hf_posenc.modeling.schemes.table import FLAGS, SCHEMES, SOURCES


pytestmark = pytest.mark.usefixtures("schemes_of_the_package")

PAGE = (ROOT / "docs" / "custom-schemes.md").read_text(encoding="utf-8")
# The files that the page builds, by name.
FILES = dict(re.findall(r"<!-- file: (\w+\.py) -->\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
LEAST = """
from hf_posenc.scheme import AttentionScheme, Boolean, EmbeddingScheme, Flag, Integer, Number, PairTerm, PositionParameter, zeros
class Mine(AttentionScheme):
    name, formula, paper, extrapolates = "mine", "q·k", "unpublished", "yes"
"""


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """A folder with the files of the page; what was imported from such a folder before is forgotten."""
    folder = tmp_path / "schemes"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def key_decay(files) -> type:
    [scheme] = register_files([files / "key_decay.py"])
    return scheme


@pytest.fixture
def saved(key_decay, tmp_path) -> Path:
    build("absolute+key_decay", position_two_sided=False).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def forget() -> None:
    """As in a process in which nobody has registered anything."""
    for name in [*SOURCES]:
        scheme = SCHEMES.pop(name)
        del SOURCES[name]
        for flag in scheme.flags:
            FLAGS[flag.name].pop(name)
            if not FLAGS[flag.name]:
                del FLAGS[flag.name]
    schemes._parsed.cache_clear()


def output(model) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs())[0]


def define(folder: Path, text: str, name: str = "mine.py") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


class TestRegistering:
    def test_its_name_and_flags_work_at_every_entry_point(self, key_decay, tmp_path):
        stock = BertModel(stock_config()).eval()
        stock.save_pretrained(tmp_path)
        flags = {"position_scheme": "absolute+key_decay", "position_two_sided": False}
        made = [
            BertModel(BertConfig(**tiny.settings("bert"), **flags)),
            AutoModel.from_config(stock_config(**flags)),
            AutoModel.from_pretrained(tmp_path, **flags),
            BertModel.from_pretrained(tmp_path, **flags),
            AutoModel.from_config(AutoConfig.from_pretrained(tmp_path, **flags)),
            with_position_scheme(stock, **flags, copy=True),
        ]
        for model in made:
            assert type(model).__name__ == "PosencBertModel"
            assert model.config.position_scheme == "absolute+key_decay" and model.config.position_two_sided is False
            assert model.encoder.layer[0].attention.self.key_decay.weight.shape == (1, 4, 8)
        assert torch.equal(output(made[2].eval()), output(stock)), "it starts silent"
        back = with_position_scheme(fill_positions(made[2]), "absolute")
        assert torch.equal(output(with_position_scheme(back, None)), output(stock))

    def test_a_flag_that_is_not_given_is_none_as_all_others_are(self, key_decay):
        config = tiny.variant_config(position_scheme="key_decay")
        assert config.position_two_sided is None and "position_two_sided" not in config.to_dict()
        assert tiny.variant_config().position_two_sided is None
        with pytest.raises(AttributeError, match="position_unknown"):
            _ = config.position_unknown

    @pytest.mark.parametrize(
        ("flags", "error", "message"),
        [
            ({"position_two_sided": 3}, TypeError, "position_two_sided must be True or False"),
            ({"position_two_side": True}, ValueError, "did you mean 'position_two_sided'"),
            ({"position_scheme": "key_decoy"}, ValueError, "did you mean 'key_decay'"),
            ({"position_scheme": "t5", "position_two_sided": True}, ValueError, "it belongs to key_decay"),
        ],
    )
    def test_wrong_flags_are_refused_as_all_others_are(self, key_decay, flags, error, message):
        with pytest.raises(error, match=message):
            stock_config(**{"position_scheme": "key_decay", **flags})

    def test_a_flag_may_be_shared(self, files):
        text = LEAST + '    flags = (Flag("position_buckets", Integer(0), 7, "how many"),)\n'
        [scheme] = register_files([define(files, text)])
        assert scheme(tiny.variant_config(position_scheme="mine")).buckets == 7
        assert tiny.variant_config(position_scheme="t5+mine", position_buckets=8).position_buckets == 8

    def test_an_embedding_scheme_has_the_flags_of_all(self, files):
        register_files([files / "log_position.py"])
        model = fill_positions(build("log_position", position_combine="concat", position_width=4))
        assert model.embeddings.log_position().shape == (4,)
        assert not torch.equal(output(model), output(build("log_position")))

    def test_the_same_again_is_nothing(self, files):
        import key_decay

        assert register_scheme(key_decay.KeyDecay) is key_decay.KeyDecay
        register_scheme(key_decay.KeyDecay)
        register_files([files / "key_decay.py"])
        assert SCHEMES["key_decay"] is key_decay.KeyDecay

    def test_a_changed_file_takes_the_place_of_the_old_one(self, key_decay, files):
        changed = FILES["key_decay.py"].replace('"position_two_sided"', '"position_both_sides"')
        changed = changed.replace("self.two_sided", "self.both_sides")
        [new] = register_files([define(files, changed, "key_decay.py")])
        assert SCHEMES["key_decay"] is new is not key_decay
        assert "position_two_sided" not in FLAGS and "position_both_sides" in FLAGS

    def test_another_of_the_name_is_an_error_that_says_where_the_first_is(self, key_decay, files):
        other = define(files, FILES["key_decay.py"] + "\n", "other.py")
        with pytest.raises(ValueError, match=rf"registered already: KeyDecay of {files}/key_decay.py; .*other.py"):
            register_files([other])
        with pytest.raises(ValueError, match="registered already: Alibi of hf_posenc"):
            register_files([define(files, LEAST.replace('"mine"', '"alibi"'))])

    def test_two_files_of_one_name_cannot_lie_beside_one_checkpoint(self, key_decay, files):
        (files / "more").mkdir()
        register_files([define(files / "more", LEAST, "key_decay.py")])
        build("mine"), build("key_decay")
        with pytest.raises(
            ValueError, match="cannot have both key_decay and mine: .*which have the same name .*rename one"
        ):
            build("absolute+key_decay+mine")

    def test_one_file_of_two_schemes_can(self, files, tmp_path):
        register_files([define(files, LEAST + LEAST.replace("Mine", "Other").replace('"mine"', '"other"'))])
        build("mine+other").save_pretrained(tmp_path / "saved")
        assert (tmp_path / "saved" / "mine.py").is_file()

    def test_a_package_registers_by_its_entry_point(self, files, monkeypatch, said):
        class Entry(importlib.metadata.EntryPoint):
            pass

        broken = Entry("broken", "nowhere:Scheme", custom_schemes.ENTRY_POINTS)
        right = Entry("key_decay", "key_decay:KeyDecay", custom_schemes.ENTRY_POINTS)
        monkeypatch.setattr(custom_schemes, "entry_points", lambda group: [broken, right])
        custom_schemes.register_entry_points()
        assert "key_decay" in SCHEMES
        assert any("nowhere:Scheme" in line and "was not registered" in line for line in said)


WRONG = {
    "no name": (
        'name, formula, paper, extrapolates = "mine",',
        'formula, paper, extrapolates, x = "mine",',
        "no position scheme",
    ),
    "no formula": ("formula, paper", "formule, paper", "needs the attribute 'formula'"),
    "no paper": ('"unpublished"', '""', "needs the attribute 'paper'"),
    "a name of two words": ('"mine"', '"my own"', "lowercase letters"),
    "another's other name": ('"mine"', '"shaw"', "an alias of 'relative'"),
    "helpers": (
        "import AttentionScheme",
        "import AttentionScheme\nfrom .helpers import f; from hf_posenc.scheme import X",
        None,
    ),
}


class TestRefused:
    @pytest.mark.parametrize("case", [case for case, (*_, message) in WRONG.items() if message])
    def test_what_is_missing(self, files, case):
        old, new, message = WRONG[case]
        with pytest.raises(ValueError, match=message):
            register_files([define(files, LEAST.replace(old, new))])
        assert "mine" not in SCHEMES and not SOURCES

    @pytest.mark.parametrize(
        ("body", "error", "message"),
        [
            ('backends = ("sdpa", "triton")', ValueError, "backends must name some of sdpa"),
            ("flags = (3,)", TypeError, "tuple of Flag"),
            (
                'flags = (Flag("width", Number(1), 2.0, "x"),)',
                ValueError,
                "must be 'position_' followed by lowercase letters",
            ),
            ('flags = Flag("position_cap", Number(1), 2.0, "x")', TypeError, r"with one flag, write \(Flag\(...\),\)"),
            ('flags = (Flag("position_cap", Integer, 2, "x"),)', TypeError, r"such as Integer\(1\)"),
            ('flags = 2 * (Flag("position_cap", Number(1), 2.0, "x"),)', ValueError, "'position_cap' occurs twice"),
            ('flags = (Flag("position_ids", Number(1), 2.0, "x"),)', ValueError, "models take it"),
            ('flags = (Flag("position_embedding_type", Boolean(), True, "x"),)', ValueError, "Transformers 4 used"),
            ('flags = (Flag("position_scheme", Boolean(), True, "x"),)', ValueError, "it names the schemes"),
            ('flags = (Flag("position_learning_rate", Number(0), 1, "x"),)', ValueError, "scripts and the trainer"),
            (
                'flags = (Flag("position_table_version", Integer(1), 1, "x"),)',
                ValueError,
                "how checkpoints of `deberta`",
            ),
            ('flags = (Flag("position_terms", Number(1), 2.0, "x"),)', ValueError, "attribute 'terms'"),
            ('flags = (Flag("position_buckets", Number(1), 2.0, "x"),)', ValueError, "same kind as for t5"),
            ('flags = (Flag("position_window", Integer(0), 0, "x"),)', ValueError, "a config option of all schemes"),
            ('name = "all"', ValueError, "'all' means all schemes"),
            ('flags = (Flag("position_reach", Integer(4), 2, "x"),)', ValueError, "at least 4"),
        ],
    )
    def test_a_wrong_declaration(self, files, body, error, message):
        with pytest.raises(error, match=message):
            register_files([define(files, f"{LEAST}    {body}\n")])
        assert "mine" not in SCHEMES

    @pytest.mark.parametrize(
        ("line", "module"),
        [
            ("import scipy", "scipy"),
            ("from .helpers import f", ".helpers"),
            ("import hf_posenc", "hf_posenc"),
            ("from hf_posenc import unpad", "unpad"),
            ("from hf_posenc.analysis import study", "hf_posenc.analysis"),
            ("def f():\n    import pandas", "pandas"),
        ],
    )
    def test_what_would_not_travel(self, tmp_path, line, module):
        with pytest.raises(ValueError, match=rf"mine.py:\d+ imports {re.escape(module)}.*would not be saved"):
            travelling(f"import torch\n{line}\n", tmp_path / "mine.py")

    @pytest.mark.parametrize(
        ("returned", "error", "message"),
        [
            ("context.query @ context.key.mT", TypeError, "must return a list of score terms, got Tensor"),
            ("None", TypeError, "got NoneType"),
            ("[context.query @ context.key.mT]", TypeError, "PairTerm, ProductTerm, SumTerm, got Tensor in it"),
            (
                "[PairTerm((context.query @ context.key.mT)[0])]",
                ValueError,
                r"PairTerm whose bias must have 4 dimensions",
            ),
        ],
    )
    @pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
    @pytest.mark.parametrize("length", [5, 200])
    def test_terms_that_are_no_terms(self, files, returned, error, message, attn_implementation, length):
        register_files([define(files, f"{LEAST}    def terms(self, context):\n        return {returned}\n")])
        model = build("mine", attn_implementation=attn_implementation, max_position_embeddings=256)
        with pytest.raises(error, match=f"`terms` of position_scheme 'mine' .*{message}"):
            model(torch.ones(1, length, dtype=torch.long))

    @pytest.mark.parametrize(
        ("returned", "error", "message"),
        [
            ("None", TypeError, "a tuple of query and key, got NoneType"),
            ("context.query", TypeError, "a tuple of query and key, got Tensor"),
            ("(context.query, None)", TypeError, "a tuple of query and key, got tuple"),
            ("(context.query, context.key[:, :, :1])", ValueError, r"a key of \(1, 4, 5, 8\), got \(1, 4, 1, 8\)"),
        ],
    )
    def test_a_rotation_that_is_none(self, files, returned, error, message):
        register_files([define(files, f"{LEAST}    def rotate(self, context):\n        return {returned}\n")])
        with pytest.raises(error, match=f"`rotate` of position_scheme 'mine' must return {message}"):
            build("mine")(torch.ones(1, 5, dtype=torch.long))

    def test_the_map_of_a_rotation(self, files):
        body = "    def rotate(self, context):\n        return -context.query, 2 * context.key\n"
        register_files([define(files, LEAST + body)])
        model = build("mine")
        [drawn] = analysis.encoding_maps(model, 6).maps
        parts = analysis.study(model).observe(torch.arange(6)[None] + 5, [0], until=1).layers[0].parts
        assert drawn.values.shape == (6, 6) and (drawn.rows, drawn.columns) == (
            "position of the query",
            "position of the key",
        )
        torch.testing.assert_close(parts["rotation"], -3 * parts["content"])
        assert drawn.values.std() > 0

    @pytest.mark.parametrize(
        ("base", "method", "name"),
        [
            ("AttentionScheme", "add_layer_parameters", "query"),
            ("AttentionScheme", "add_layer_parameters", "is_causal"),
            ("AttentionScheme", "add_layer_parameters", "num_heads"),
            ("AttentionScheme", "add_layer_parameters", "relative_attention_bias"),
            ("AttentionScheme", "add_encoder_parameters", "layer"),
            ("EmbeddingScheme", "add_parameters", "position_embeddings"),
            ("EmbeddingScheme", "add_parameters", "dropout"),
        ],
    )
    def test_a_parameter_under_a_name_that_is_taken(self, files, base, method, name):
        body = f"    def {method}(self, module, config):\n        module.{name} = PositionParameter((1,), zeros)\n"
        register_files([define(files, LEAST.replace("Mine(AttentionScheme)", f"Mine({base})") + body)])
        before = "t5+" if name == "relative_attention_bias" else ""
        flags = {"position_per_layer": True} if before else {}
        with pytest.raises(ValueError, match=f"'mine' registers '{name}' on .*already uses"):
            build(f"{before}mine", **flags)

    def test_two_schemes_do_not_share_a_parameter(self, files):
        body = "    def add_layer_parameters(self, module, config):\n        module.slope = PositionParameter((1,), zeros)\n"
        text = LEAST + body + LEAST.replace("Mine", "Other").replace('"mine"', '"other"') + body
        register_files([define(files, text)])
        build("mine"), build("other")
        with pytest.raises(ValueError, match="'other' registers 'slope'"):
            build("mine+other")

    def test_a_model_of_the_class_before_is_not_saved_with_the_new_file(self, files, tmp_path):
        register_files([define(files, LEAST)])
        model = build("mine")
        register_files([define(files, LEAST + "    def scaling(self, scaling):\n        return 2 * scaling\n")])
        with pytest.raises(ValueError, match="'mine' was registered again after the model was built"):
            model.save_pretrained(tmp_path / "saved")
        register_files([define(files, LEAST)])
        build("mine").save_pretrained(tmp_path / "saved")

    def test_a_name_that_nobody_knows(self):
        with pytest.raises(ValueError, match="registered first, by hf_posenc.register_scheme or"):
            build("mine")
        with pytest.raises(ValueError, match="names of schemes joined by"):
            build("t5+")

    def test_what_has_no_file(self, files):
        with pytest.raises(ValueError, match="defined in a Python file"):
            exec(LEAST + "\nfrom hf_posenc import register_scheme\nregister_scheme(Mine)", {"__name__": "__main__"})
        with pytest.raises(ValueError, match="rename it"):
            register_files([define(files, LEAST, "t5.py")])
        with pytest.raises(ValueError, match="top level"):
            register_scheme(type("Local", (SCHEMES["t5"],), {"__qualname__": "f.<locals>.Local"}))
        with pytest.raises(TypeError, match="subclass of AttentionScheme"):
            register_scheme(BertModel)

    def test_a_file_that_cannot_be_run(self, files):
        with pytest.raises(ValueError, match="cannot be run: NameError"):
            register_files([define(files, "x = undefined\n")])
        with pytest.raises(FileNotFoundError):
            register_files([files / "nowhere.py"])


# Of a scheme: a function, a constant, a default, an attribute and a second class that it computes with.
EDITED = """
import torch
from hf_posenc.scheme import AttentionScheme, PositionParameter, ones
FACTOR = 1.0
def shape(x, power=0.5):
    return x**power
class Base(AttentionScheme):
    sign = -1  # a penalty
    def add_layer_parameters(self, attention, config):
        attention.recency = PositionParameter((attention.num_heads,), ones)
class Recency(Base):
    name, formula, paper, extrapolates = "recency", "f", "p", "yes"
    def terms(self, context):
        s = context.attention.recency()[:, None]
        return [context.positions.bias(lambda r: self.sign * FACTOR * s * shape(r[..., None, :].abs().to(s.dtype)))]
"""
EDITS = {
    "a method": ("FACTOR * s", "FACTOR * s * s"),
    "a function": ("x**power", "x * power"),
    "a constant": ("FACTOR = 1.0", "FACTOR = 2.0"),
    "a default": ("power=0.5", "power=0.7"),
    "a base class": ("sign = -1", "sign = +1"),
    "an import": ("import torch", "import torch, math"),
    "broken": ("class Recency", "class Recency ("),
    "no encoding": ("\nimport torch", "# coding: klingon\nimport torch"),
    "emptied": (EDITED, ""),
}


class TestFilesThatChange:
    """A checkpoint carries what ran, or nothing is registered."""

    @pytest.fixture
    def imported(self, files, monkeypatch):
        """The module of `EDITED`, imported as a user does."""
        monkeypatch.setattr(sys, "dont_write_bytecode", False)
        define(files, EDITED, "edited.py")
        monkeypatch.delitem(sys.modules, "edited", raising=False)
        yield importlib.import_module("edited")
        sys.modules.pop("edited", None)

    @staticmethod
    def computes_as_saved(folder: Path) -> bool:
        """Whether the file beside a checkpoint, run by itself, gives the outputs of the model that was saved."""
        model = fill_positions(build("recency"))
        model.save_pretrained(folder)
        expected = output(model)
        forget()
        return torch.equal(output(AutoModel.from_pretrained(folder, trust_remote_code=True)), expected)

    def test_a_file_as_it_was_imported_is_registered(self, imported, tmp_path):
        register_scheme(imported.Recency)
        assert self.computes_as_saved(tmp_path / "saved")

    @pytest.mark.parametrize("edit", EDITS)
    def test_one_that_was_edited_is_refused(self, edit, imported, files):
        old, new = EDITS[edit]
        define(files, EDITED.replace(old, new), "edited.py")
        with pytest.raises(ValueError, match=r"edited.py was changed after .*importlib.reload\(edited\)"):
            register_scheme(imported.Recency)
        assert "recency" not in SCHEMES

    @pytest.mark.parametrize("edit", ["a constant", "a base class"])
    def test_one_that_was_edited_after_it_was_registered_is_refused_too(self, edit, imported, files, tmp_path):
        register_scheme(imported.Recency)
        define(files, EDITED.replace(*EDITS[edit]), "edited.py")
        with pytest.raises(ValueError, match="was changed after"):
            register_scheme(imported.Recency)
        assert "FACTOR = 1.0" in SOURCES["recency"].text and "sign = -1" in SOURCES["recency"].text
        assert self.computes_as_saved(tmp_path / "saved")

    def test_imported_anew_it_is_registered_and_the_class_before_is_not(self, imported, files, tmp_path):
        before = imported.Recency
        define(files, EDITED.replace("FACTOR = 1.0", "FACTOR = 2.25"), "edited.py")
        importlib.reload(imported)
        with pytest.raises(ValueError, match="was changed after"):
            register_scheme(before)
        register_scheme(imported.Recency)
        assert "2.25" in SOURCES["recency"].text and self.computes_as_saved(tmp_path / "saved")

    def test_what_python_takes_for_the_old_file_is_not_taken_for_the_new_one(self, imported, files, tmp_path):
        """An edit of the same size in the same second: Python runs what it compiled before."""
        file = files / "edited.py"
        stamp = file.stat().st_mtime_ns
        define(files, EDITED.replace("FACTOR = 1.0", "FACTOR = 2.0"), "edited.py")
        os.utime(file, ns=(stamp, stamp))
        importlib.reload(imported)
        assert imported.FACTOR == 1.0
        with pytest.raises(ValueError, match="delete __pycache__"):
            register_scheme(imported.Recency)
        [scheme] = register_files([file])
        assert sys.modules[scheme.__module__].FACTOR == 2.0 and self.computes_as_saved(tmp_path / "saved")

    def test_what_does_not_run_may_change(self, imported, files):
        define(files, EDITED.replace("# a penalty", "# so much"), "edited.py")
        register_scheme(imported.Recency)
        assert "# so much" in SOURCES["recency"].text

    def test_a_class_that_no_import_made_is_refused(self, imported):
        late = type("Late", (imported.Recency,), {"name": "late", "__module__": "edited"})
        with pytest.raises(ValueError, match="Late must be defined while .*edited.py is imported"):
            register_scheme(late)

    def test_a_module_that_is_rewritten_as_it_is_imported_is_registered(self, files, monkeypatch):
        """As pytest rewrites its own: what ran is not what a plain import compiles."""
        text = EDITED.replace("        s = context", "        assert self.name == 'recency'\n        s = context")
        define(files, text, "test_edited.py")
        monkeypatch.delitem(sys.modules, "test_edited", raising=False)
        module = importlib.import_module("test_edited")
        assert type(module.__loader__).__name__ == "AssertionRewritingHook"
        register_scheme(module.Recency)
        sys.modules.pop("test_edited")

    @pytest.mark.parametrize("begin", [b"\xef\xbb\xbf", b"\xef\xbb\xbf# -*- coding: utf-8 -*-", b"# coding: utf-8"])
    def test_a_byte_order_mark_stays_behind(self, begin, files, tmp_path):
        (files / "marked.py").write_bytes(
            begin + EDITED.replace("# a penalty", "# Größe").encode().replace(b"\n", b"\r\n")
        )
        register_files([files / "marked.py"])
        assert self.computes_as_saved(tmp_path / "saved")
        content = (tmp_path / "saved" / "marked.py").read_bytes()
        assert content.startswith(begin.removeprefix(b"\xef\xbb\xbf")) and "Größe".encode() in content

    def test_another_encoding_is_refused(self, files):
        (files / "latin.py").write_bytes(
            b"# coding: latin-1\n" + EDITED.replace("# a penalty", "# Größe").encode("latin-1")
        )
        with pytest.raises(ValueError, match="latin.py declares the encoding iso-8859-1: save it as UTF-8"):
            register_files([files / "latin.py"])


def test_imports_become_those_of_siblings(tmp_path):
    text = """# Größe
import math
from hf_posenc.scheme import (
    AttentionScheme,  # the base
    Flag, Dictionary as Zahl,
    t5_bucket,
)
if math:
    from hf_posenc.modeling.schemes.deberta import Deberta
    from hf_posenc import register_scheme as r; x = "ß"
"""
    assert (
        travelling(text, tmp_path)
        == """# Größe
import math
from .scheme import (
    AttentionScheme,  # the base
    Flag, Dictionary as Zahl,
    t5_bucket,
)
if math:
    from .deberta import Deberta
    from .scheme import register_scheme as r; x = "ß"
"""
    )


def test_every_public_name_travels(saved):
    """What `hf_posenc.scheme` has is also beside a checkpoint, and is the same there."""
    import hf_posenc.scheme

    text = at_home((saved / "scheme.py").read_text(encoding="utf-8"))
    exec(compile(text, "scheme.py", "exec"), beside := {"__name__": "scheme"})
    assert beside["__all__"] == hf_posenc.scheme.__all__
    for name in {*beside["__all__"]} - {"register_scheme"}:
        assert beside[name] is getattr(hf_posenc.scheme, name)
    assert beside["register_scheme"] is schemes.register


def test_a_file_from_beside_a_checkpoint_imports_the_package():
    """As it is saved, and as it was before there were rooms."""
    text = """
from .scheme import AttentionScheme, zeros
    from .flags import Flag
from .relative_positions import (
from .schemes import register as register_scheme
from .table import register
from .deberta import Deberta
from .absent import nothing
from torch import nn
"""
    assert (
        at_home(text)
        == """
from hf_posenc.scheme import AttentionScheme, zeros
    from hf_posenc.modeling.schemes.flags import Flag
from hf_posenc.modeling.schemes.positions import (
from hf_posenc.modeling.schemes.table import register as register_scheme
from hf_posenc.modeling.schemes.table import register
from hf_posenc.modeling.schemes.deberta import Deberta
from .absent import nothing
from torch import nn
"""
    )


LOAD = """
import torch
from transformers import AutoModel
tokens, expected = torch.load({outputs!r})
model = AutoModel.from_pretrained({folder!r}, trust_remote_code={trust})
assert type(model).__module__.startswith({package!r}), type(model).__module__
print("differs by", float((model(**tokens)[0] - expected).abs().max()))
model.save_pretrained({again!r})
"""


class TestTravelling:
    def test_a_checkpoint_has_the_file(self, saved):
        config = json.loads((saved / "config.json").read_text())
        assert config["scheme_files"] == {"key_decay": "key_decay.KeyDecay"} and config["position_two_sided"] is False
        text = (saved / "key_decay.py").read_text(encoding="utf-8")
        assert "hf_posenc" not in text and "from .scheme import AttentionScheme, Boolean, Flag" in text
        assert "from .key_decay import KeyDecay" in (saved / "configuration_posenc.py").read_text(encoding="utf-8")

    def test_a_card_says_how_the_scheme_is_registered(self, saved):
        card = write_card(saved).read_text(encoding="utf-8")
        [load, *_] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        assert load.startswith("import hf_posenc\nfrom key_decay import KeyDecay\nfrom transformers import")
        assert "\n\nhf_posenc.register_scheme(KeyDecay)\n\ntokenizer = " in load
        assert f"hf-posenc card {saved} --scheme-file key_decay.py" in card
        assert "only torch, numpy, transformers and" in card

    def test_others_have_not(self, key_decay, tmp_path):
        build("absolute+t5").save_pretrained(tmp_path / "t5")
        assert not (tmp_path / "t5" / "key_decay.py").exists()
        assert "scheme_files" not in json.loads((tmp_path / "t5" / "config.json").read_text())

    @pytest.mark.parametrize("decorated", [False, True])
    @pytest.mark.parametrize(("plugin", "trust"), [(False, True), (True, True)])
    def test_it_loads_by_trust_and_is_saved_again_as_it_was(self, files, tmp_path, plugin, trust, decorated):
        text = FILES["key_decay.py"]
        if decorated:  # the file registers its scheme itself
            text = text.replace("class KeyDecay", "@register_scheme\nclass KeyDecay")
            text = text.replace("from hf_posenc.scheme import ", "from hf_posenc.scheme import register_scheme, ")
        (files / "key_decay.py").write_text(text, encoding="utf-8")
        register_files([files / "key_decay.py"])
        model, saved = build("absolute+key_decay", position_two_sided=False), tmp_path / "saved"
        model.save_pretrained(saved)
        assert decorated == ("@register_scheme" in (saved / "key_decay.py").read_text(encoding="utf-8"))
        torch.save((inputs(), output(model)), tmp_path / "outputs.pt")
        places = {"outputs": str(tmp_path / "outputs.pt"), "folder": str(saved), "again": str(tmp_path / "again")}
        code = LOAD.format(trust=trust, package="hf_posenc" if plugin else "transformers_modules", **places)
        said = run_fresh("import hf_posenc\n" * plugin + code, tmp_path / "modules", plugin)
        assert float(re.search(r"differs by (\S+)", said)[1]) < 1e-5
        for file in saved.iterdir():
            assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name

    def test_without_registration_or_trust_it_is_refused(self, saved):
        forget()
        for load in (AutoModel.from_pretrained, BertModel.from_pretrained, AutoConfig.from_pretrained):
            with pytest.raises(ValueError, match=r"key_decay.py.*register_scheme\(KeyDecay\).*trust_remote_code=True"):
                load(saved)
        assert AutoModel.from_pretrained(saved, trust_remote_code=True).config.position_scheme == "absolute+key_decay"

    def test_trust_registers_it_for_this_process(self, saved, said):
        expected = output(AutoModel.from_pretrained(saved))
        forget()
        assert torch.equal(output(AutoModel.from_pretrained(saved, trust_remote_code=True)), expected)
        assert torch.equal(output(AutoModel.from_pretrained(saved)), expected)
        assert not any("another text" in line for line in said)
        build("key_decay").save_pretrained(saved / "again")
        assert (saved / "again" / "key_decay.py").read_text() == (saved / "key_decay.py").read_text()

    @pytest.mark.parametrize(
        "old, new", [(".scheme", ".scheme"), (".relative_positions", ".positions"), (".schemes", ".table")]
    )
    def test_a_file_from_before_that_imports_the_same_is_the_same(self, old, new, saved, said):
        """Files of the package had other names beside checkpoints."""
        text = (saved / "key_decay.py").read_text().replace("from .scheme import", f"from {new} import")
        SOURCES["key_decay"] = dataclasses.replace(SOURCES["key_decay"], text=text)
        (saved / "key_decay.py").write_text(text.replace(f"from {new} import", f"from {old} import"))
        AutoModel.from_pretrained(saved)
        assert not any("another text" in line for line in said)

    def test_a_file_that_says_something_else_is_told(self, saved, said):
        file = saved / "key_decay.py"
        file.write_text(file.read_text().replace("log1p", "sqrt"))
        AutoModel.from_pretrained(saved)
        assert any("a position_scheme 'key_decay'" in line for line in said)

    @pytest.fixture
    def two(self, files, tmp_path) -> dict[Path, torch.Tensor]:
        """Two checkpoints in folders of one name, each with a scheme of its own in a `mine.py`, and their outputs."""
        made = {}
        for name, power in (("first", 0.5), ("second", 1.5)):
            (files / name).mkdir()
            text = EDITED.replace('"recency"', f'"{name}"').replace("power=0.5", f"power={power}")
            register_files([define(files / name, text, "mine.py")])
            model = build(name)
            model.save_pretrained(tmp_path / name / "checkpoint")
            made[tmp_path / name / "checkpoint"] = output(model)
            forget()
        return made

    def test_two_files_of_one_name_load_in_one_process(self, two, tmp_path):
        models = {folder: AutoModel.from_pretrained(folder, trust_remote_code=True) for folder in two}
        for folder, model in models.items():
            assert torch.equal(output(model), two[folder])
            again = tmp_path / "again" / folder.parent.name
            model.save_pretrained(again)
            for file in folder.iterdir():
                assert (again / file.name).read_bytes() == file.read_bytes(), file.name

    @pytest.mark.slow
    def test_and_without_hf_posenc(self, two, tmp_path):
        torch.save((inputs(), [*two.values()]), tmp_path / "outputs.pt")
        code = f"""
import torch
from transformers import AutoModel
tokens, expected = torch.load({str(tmp_path / "outputs.pt")!r})
models = [AutoModel.from_pretrained(folder, trust_remote_code=True) for folder in {[*map(str, two)]!r}]
print("differ by", max(float((model(**tokens)[0] - wanted).abs().max()) for model, wanted in zip(models, expected)))
"""
        said = run_fresh(code, tmp_path / "modules", plugin=False)
        assert float(re.search(r"differ by (\S+)", said)[1]) < 1e-5

    @pytest.mark.parametrize("trust", [True, False])
    def test_two_schemes_of_one_name_do_not_stand_for_each_other(self, saved, tmp_path, trust):
        other = shutil.copytree(saved, tmp_path / "other")
        (other / "key_decay.py").write_text((saved / "key_decay.py").read_text().replace("log1p", "sqrt"))
        forget()
        expected = output(AutoModel.from_pretrained(saved, trust_remote_code=True))
        with pytest.raises(
            ValueError, match=rf"{other} has .*code differs from {saved}/key_decay.py.*another process"
        ):
            AutoModel.from_pretrained(other, trust_remote_code=trust)
        assert torch.equal(output(AutoModel.from_pretrained(saved)), expected)

    def test_the_name_of_one_of_the_package_is_refused(self, saved):
        entries = json.loads((saved / "config.json").read_text())
        entries |= {"position_scheme": "absolute+alibi", "scheme_files": {"alibi": "key_decay.KeyDecay"}}
        del entries["position_two_sided"]
        (saved / "config.json").write_text(json.dumps(entries))
        with pytest.raises(ValueError, match="hf_posenc has another scheme with this name"):
            AutoModel.from_pretrained(saved, trust_remote_code=True)

    def test_it_leaves_a_model_that_gets_another_scheme(self, saved, tmp_path):
        model = AutoModel.from_pretrained(saved, position_scheme="t5")
        model.save_pretrained(tmp_path / "t5")
        assert not (tmp_path / "t5" / "key_decay.py").exists() and model.config.position_two_sided is None

    @pytest.mark.slow
    def test_a_composite_carries_every_file(self, key_decay, files, tmp_path):
        from recency import Recency

        register_scheme(Recency)
        model = build("recency+key_decay+t5")
        model.save_pretrained(tmp_path / "both")
        torch.save((inputs(), output(model)), tmp_path / "outputs.pt")
        places = {
            "outputs": str(tmp_path / "outputs.pt"),
            "folder": str(tmp_path / "both"),
            "again": str(tmp_path / "again"),
        }
        code = LOAD.format(trust=True, package="transformers_modules", **places)
        said = run_fresh(code, tmp_path / "modules", plugin=False)
        assert float(re.search(r"differs by (\S+)", said)[1]) < 1e-5

    @pytest.mark.slow
    def test_classes_of_one_name_in_two_files_load_without_hf_posenc(self, files, tmp_path):
        for name in ("first", "second"):
            register_files([define(files, EDITED.replace("recency", name), f"{name}.py")])
        model = build("absolute+first+second")
        model.save_pretrained(tmp_path / "both")
        torch.save((inputs(), output(model)), tmp_path / "outputs.pt")
        code = f"""
import torch
from transformers import AutoModel
tokens, wanted = torch.load({str(tmp_path / "outputs.pt")!r})
model = AutoModel.from_pretrained({str(tmp_path / "both")!r}, trust_remote_code=True)
print("differs by", float((model(**tokens)[0] - wanted).abs().max()))
"""
        said = run_fresh(code, tmp_path / "modules", plugin=False)
        assert float(re.search(r"differs by (\S+)", said)[1]) < 1e-5


class TestCommandLine:
    @pytest.fixture
    def run(self, capsys):
        def run(*words: str) -> tuple[int, str, str]:
            with pytest.raises(SystemExit) as ended:
                cli.main([*map(str, words)])
            return ended.value.code, *capsys.readouterr()

        return run

    def test_a_scheme_file_stands_with_every_command(self, run, files):
        code, said, _ = run("schemes", "--scheme-file", files / "key_decay.py")
        assert code == 0 and "(k_j·u_h^±)" in said and "position_two_sided" in said
        code, said, _ = run(f"--scheme_file={files / 'key_decay.py'}", "convert", "--help")
        assert code == 0 and "--position-two-sided" in said
        code, _, wrong = run("schemes", "--scheme-file")
        assert code == 2 and "requires an argument" in wrong
        code, _, wrong = run("schemes", "--scheme-file", define(files, "x = 1\n"))
        assert code == 2 and "defines no position scheme" in wrong

    def test_inspect_and_card_know_it(self, run, saved, files):
        forget()
        assert run("inspect", saved)[0] == 2
        code, said, _ = run("inspect", saved, "--scheme-file", files / "key_decay.py")
        assert code == 0 and "key_decay: q_i·k_j/√d" in said
        code, *_ = run("card", saved, "--scheme-file", files / "key_decay.py", "--repo", "me/mine")
        assert code == 0 and "key_decay" in (saved / "README.md").read_text(encoding="utf-8")

    def test_scripts_take_its_file_and_flags(self, files, monkeypatch):
        import arguments

        monkeypatch.setattr(
            sys,
            "argv",
            ["x.py", "--scheme_file", str(files / "key_decay.py"), "--position_scheme", "key_decay"]
            + ["--position_two_sided", "false"],
        )
        [positions] = arguments.parse_arguments(arguments.PositionArguments)
        assert positions.flags() == {"position_scheme": "key_decay", "position_two_sided": False}
        settings = files / "settings.json"
        settings.write_text(json.dumps({"scheme_file": [str(files / "recency.py")], "position_scheme": "recency"}))
        monkeypatch.setattr(sys, "argv", ["x.py", str(settings)])
        [positions] = arguments.parse_arguments(arguments.PositionArguments)
        assert positions.flags() == {"position_scheme": "recency"}
        monkeypatch.setattr(sys, "argv", ["x.py", "--scheme_file", str(files / "nowhere.py")])
        with pytest.raises(SystemExit, match="error: --scheme_file: .*nowhere.py"):
            arguments.parse_arguments(arguments.PositionArguments)


@pytest.mark.slow
def test_it_is_trained_by_a_script_and_goes_on(files, tmp_path, monkeypatch):
    """A run ends with a checkpoint that has the file, and one with another text of it is another run."""
    import run_classification
    import tiny_checkpoints

    tiny_checkpoints.save(tmp_path / "checkpoint")
    data = tmp_path / "train.csv"
    data.write_text("sentence,label\n" + "".join(f"{tiny_checkpoints.text(6, seed=n)},{n % 2}\n" for n in range(16)))

    def train() -> None:
        words = f"--model_name_or_path {tmp_path / 'checkpoint'} --train_file {data} --do_train --max_steps 3 --output_dir {tmp_path / 'out'} "
        words += f"--scheme_file {files / 'key_decay.py'} --position_scheme absolute+key_decay --position_learning_rate 0.1 --report_to none"
        monkeypatch.setattr(sys, "argv", ["run_classification.py", *words.split()])
        run_classification.main()

    train()
    model = AutoModel.from_pretrained(tmp_path / "out")
    assert all(layer.attention.self.key_decay.weight.any() for layer in model.encoder.layer)
    assert (tmp_path / "out" / "key_decay.py").is_file()
    train()
    define(files, FILES["key_decay.py"] + "# changed\n", "key_decay.py")
    with pytest.raises(SystemExit, match="file of key_decay"):
        train()


@pytest.mark.slow
def test_a_checkpoint_is_converted_to_it(key_decay, tmp_path):
    """Calibration fits its scores to those of the original, and distillation goes on from there."""
    import tiny_checkpoints

    tiny_checkpoints.save(tmp_path / "checkpoint")
    text = [define(tmp_path, tiny_checkpoints.text(3000), "text.txt")]
    hf_posenc.convert(
        tmp_path / "checkpoint", "key_decay", output=tmp_path / "out", text=[str(path) for path in text], max_steps=20
    )
    model = AutoModel.from_pretrained(tmp_path / "out")
    assert model.config.position_scheme == "key_decay"
    assert all(layer.attention.self.key_decay.weight.any() for layer in model.encoder.layer)


def test_a_conversion_begins_with_its_own_start_and_options(files):
    """A custom scheme that rotates as rope does gets, by the same tool, the projections that rope gets, and chooses an option."""
    text = (
        FILES["learned_turns.py"]
        .replace(
            "    def initialize_from",
            "    flags = (Flag('position_turns', Number(0), 1.0, 'nothing'),)\n    conversion_options = classmethod("
            "lambda cls, aims: {'position_turns': float(aims.max_length)})\n\n    def initialize_from",
        )
        .replace("import AttentionScheme,", "import AttentionScheme, Flag, Number,")
    )
    (files / "learned_turns.py").write_text(text, encoding="utf-8")
    register_files([files / "learned_turns.py"])
    torch.manual_seed(0)
    teacher = BertModel(stock_config("bert")).eval()
    batches = [{"input_ids": torch.randint(1, 90, (4, 24)), "attention_mask": torch.ones(4, 24, dtype=torch.long)}]
    students = [with_position_scheme(teacher, name, copy=True) for name in ("none", "rope", "learned_turns")]
    for student in students:
        start(student, teacher, batches)
    query = "encoder.layer.1.attention.self.query.weight"
    without, rope, own = (student.state_dict()[query] for student in students)
    torch.testing.assert_close(own, rope, rtol=0, atol=1e-6)
    assert (own - without).abs().max() > 0.01
    assert conversion_options(teacher.config, "learned_turns", {}, 64, 96) == {"position_turns": 96.0}
