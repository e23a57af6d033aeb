"""The report and single figures: what they say is what was measured, and files are written whole or not at all."""

import html
import json
import re
import sys
from typing import ClassVar

import pytest
from fresh_process import run_fresh
from reading import documents, subject, tokenizer
from tiny import build, stock_config
from tqdm import tqdm
from transformers import BertModel

from hf_posenc.analysis import FIGURES, SCHEME, check_page, figure_named, read_texts, report, study
from hf_posenc.analysis.files import drawn, plot_to_file
from hf_posenc.files import write_whole
from hf_posenc_cli import main


QUICK = ("encoding", "clock-hands", "phase-shift")


@pytest.fixture(scope="module")
def made():
    """A report on two models, one with a name that HTML must not take for its own."""
    models = subject("absolute"), study(subject("sinusoidal+t5"), name="<b>both</b> & more")
    return report(*models, texts=documents(), figures=QUICK, progress=False)


@pytest.fixture
def folder(tmp_path):
    """A saved model with its tokenizer."""
    build("absolute").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def run(capsys):
    """Run a command line; returns exit code, output and error output."""

    def run(*arguments) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit:
            main([*map(str, arguments)])
        printed = capsys.readouterr()
        return exit.value.code or 0, printed.out, printed.err

    return run


class TestReport:
    def test_has_a_finding_of_every_figure_for_every_model(self, made):
        assert list(made.findings) == list(QUICK)
        for row in made.findings.values():
            assert [finding.model for finding in row] == ["absolute", "<b>both</b> & more"]
        assert made.findings["clock-hands"][0].record is None
        assert "no sines and cosines" in made.findings["clock-hands"][0].sentence

    def test_the_page_says_what_was_found_and_nothing_is_fetched(self, made):
        page = made.to_html()
        assert "<b>both" not in page and "&lt;b&gt;both&lt;/b&gt; &amp; more" in page
        for row in made.findings.values():
            for finding in row:
                assert html.escape(finding.sentence, quote=False).replace("'", "&#39;").replace('"', "&#34;") in page
        images = re.findall(r'<img src="data:image/png;base64,[^"]+" alt="([^"]+)">', page)
        assert len(images) == 5 and all(len(alternative) > 40 for alternative in images)
        addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
        assert (
            all(address.startswith(("data:", "#")) for address in addresses)
            and "http:" not in page
            and "https:" not in page
        )

    def test_a_glance_has_numbers_of_the_findings(self, made):
        rows = dict(made.glance())
        assert rows["Position scheme"] == ["absolute", "sinusoidal+t5"] and rows["Maximum sequence length"] == [
            "64 tokens",
            "no limit",
        ]
        changes = [finding.record.all[0].text for finding in made.findings["phase-shift"]]
        assert rows["… if all positions are shifted by 1"] == [f"{change:.1%}" for change in changes]

    def test_the_numbers_lie_beside_the_page(self, made, tmp_path):
        page, numbers = made.save(tmp_path / "new" / "report.html")
        assert page.read_text(encoding="utf-8") == made.to_html() and numbers.name == "report.html.json"
        data = json.loads(numbers.read_text(encoding="utf-8"))
        assert [model["position_scheme"] for model in data["models"]] == ["absolute", "sinusoidal+t5"]
        [finding, _] = made.findings["phase-shift"]
        entry = data["figures"]["phase-shift"]["models"]["absolute"]
        assert entry["sentence"] == finding.sentence
        assert entry["data"]["all"][0]["text"] == pytest.approx(finding.record.all[0].text, rel=1e-4)

    def test_a_notebook_shows_the_page_in_a_frame(self, made):
        frame = made._repr_html_()
        assert html.unescape(re.search(r'srcdoc="([^"]*)"', frame).group(1)) == made.to_html()

    @pytest.mark.slow
    def test_models_of_one_name_are_told_apart(self):
        both = report(subject("none"), subject("none"), figures=["encoding"], progress=False)
        assert [one.name for one in both.subjects] == ["none", "none (2)"]

    @pytest.mark.slow
    def test_has_all_figures_by_default_and_says_what_a_scheme_without_a_checkpoint_lacks(self):
        made = report("alibi", progress=False)
        assert list(made.findings) == list(FIGURES)
        for name, [finding] in made.findings.items():
            assert finding.record is None or FIGURES[name].needs == SCHEME
        assert made.findings["distance"][0].record is not None


class Bar(tqdm):
    """A bar that keeps what it showed."""

    shown: ClassVar[list[tuple[str, float, str]]] = []

    def update(self, n=1):
        self.shown.append((self.desc, self.n, self.postfix))
        return super().update(n)


class TestProgress:
    @pytest.mark.parametrize(
        "name, step",
        [
            ("spaces", "rotation 200 of 200"),
            pytest.param("order", "sentence 60 of 60", marks=pytest.mark.slow),
            ("phase-shift", "shift 8 of 8"),
            ("probes", "layer 3 of 3"),
            ("terms", "batch 5 of 5"),
            ("attention-properties", "batch 12 of 12"),
        ],
    )
    def test_the_bar_moves_within_a_figure(self, name, step, monkeypatch, capsys):
        monkeypatch.setattr(sys.modules["hf_posenc.analysis.report"], "tqdm", Bar)
        monkeypatch.setattr(Bar, "shown", [])
        report(subject("absolute"), texts=documents(), figures=["encoding", name])
        own = [(share, said) for label, share, said in Bar.shown if name in label]
        shares = [share for share, _ in own]
        assert shares == sorted(shares) and 1 <= shares[0] and shares[-1] == 2 and len({*shares}) > 2
        assert step in [said for _, said in own] and own[-1][1] == ""
        assert "2/2" in capsys.readouterr().err

    def test_nobody_is_told_of_what_is_measured_without_a_report(self, monkeypatch):
        monkeypatch.setattr(sys.modules["hf_posenc.analysis.report"], "tqdm", Bar)
        monkeypatch.setattr(Bar, "shown", [])
        report(subject("absolute"), texts=documents(), figures=["terms"])
        count = len(Bar.shown)
        figure_named("terms").measure(subject("absolute"))
        assert len(Bar.shown) == count > 0


class TestErrors:
    def test_say_what_is_wrong_before_a_model_is_loaded(self):
        for arguments, said in (
            ({"figures": ["probe"]}, "there is no figure 'probe'; the figures are encoding, "),
            ({"texts": []}, "no text was given"),
            ({"texts": ["a", " \n"]}, "text 2 of 2 is empty"),
        ):
            with pytest.raises(ValueError, match=said):
                report("no/such/model", **arguments)
        with pytest.raises(ValueError, match="at least one model"):
            report()
        with pytest.raises(TypeError, match="a text must be a string, got 3"):
            report("no/such/model", texts=[3])

    def test_a_page_has_a_name_of_one(self, made, tmp_path):
        with pytest.raises(ValueError, match="must end in .html"):
            made.save(tmp_path / "report.pdf")

    def test_a_text_file_that_holds_nothing(self, tmp_path):
        (tmp_path / "empty.txt").write_text("\n\n  \n")
        with pytest.raises(ValueError, match="there is no text in .*empty.txt"):
            read_texts(tmp_path / "empty.txt")
        (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
        with pytest.raises(ValueError, match="latin.txt is not text in UTF-8"):
            read_texts(tmp_path / "latin.txt")

    def test_a_figure_that_is_named_twice_is_measured_once(self):
        figures = ["phase-shift", "similarity", "phase_shift"]
        assert [*report(subject("absolute"), texts=documents(), figures=figures).findings] == [
            "phase-shift",
            "similarity",
        ]

    @pytest.mark.parametrize("blank", ["\n\n", "\n \n", "\n \t\n\n"])
    def test_a_text_file_is_read_in_documents(self, tmp_path, blank):
        paragraphs = [f"{number} " + "word " * 300 for number in range(8)]
        (tmp_path / "text.txt").write_text(blank.join(paragraphs))
        texts = read_texts(tmp_path / "text.txt", size=3000)
        assert len(texts) == 4 and "".join(texts).split() == " ".join(paragraphs).split()


class TestFiles:
    def test_nothing_is_left_behind_where_one_file_cannot_be_written(self, made, tmp_path):
        (tmp_path / "report.html.json").mkdir()
        with pytest.raises(OSError, match="is a folder"):
            made.save(tmp_path / "report.html")
        assert [path.name for path in tmp_path.iterdir()] == ["report.html.json"]

    def test_numbers_replace_those_of_a_report_and_nothing_else(self, made, tmp_path):
        page, numbers = made.save(tmp_path / "config.html")
        (tmp_path / "config.json").write_text("{}")
        assert made.save(page) == (page, numbers) and (tmp_path / "config.json").read_text() == "{}"
        before = page.read_bytes()
        for content in (b'{"mine": 1}', b"", b"\xff\xfe", b"[]", b"3", numbers.read_bytes()[:-1]):
            numbers.write_bytes(content)
            for write in (check_page, made.save):
                with pytest.raises(
                    FileExistsError, match="config.html.json, the file for the numbers of .*not from a report"
                ):
                    write(page)
            assert numbers.read_bytes() == content and page.read_bytes() == before

    def test_a_page_that_cannot_be_written_is_said_before_a_model_is_loaded(self, run, tmp_path):
        (tmp_path / "there").write_text("")
        for command, name in ((("report",), "x.html"), (("plot", "encoding"), "x.png")):
            code, _, err = run(*command, "no/model", "--out", tmp_path / "there" / name)
            assert code == 2 and f"{name} cannot be written: {tmp_path / 'there'} is not a folder" in err

    def test_what_was_there_stays_where_writing_fails(self, tmp_path, monkeypatch):
        (tmp_path / "a.svg").write_bytes(b"old")
        monkeypatch.setattr("pathlib.Path.write_bytes", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(OSError, match="full"):
            write_whole({tmp_path / "a.svg": b"new"})
        assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]

    @pytest.mark.slow
    def test_the_same_record_gives_the_same_file(self):
        figure = figure_named("clock-hands")
        record = figure.measure("rope")
        for format, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
            first, second = drawn(figure, record, format), drawn(figure, record, format)
            assert first == second and first.startswith(start)

    def test_a_figure_and_a_page_follow_links(self, made, tmp_path):
        for name in ("a.png", "a.html"):
            (tmp_path / name).symlink_to(f"real-{name}")
        plot_to_file("encoding", "alibi", tmp_path / "a.png")
        made.save(tmp_path / "a.html")
        assert sorted(path.name for path in tmp_path.iterdir() if not path.is_symlink()) == [
            "a.html.json",
            "real-a.html",
            "real-a.png",
        ]

    def test_a_figure_goes_where_it_is_asked_to(self, tmp_path):
        sentence = plot_to_file("encoding", "alibi", tmp_path / "alibi.SVG")
        assert "alibi" in sentence and b"</svg>" in (tmp_path / "alibi.SVG").read_bytes()


@pytest.mark.slow
class TestCommands:
    @pytest.mark.slow
    def test_a_report_is_written(self, run, folder, tmp_path):
        (tmp_path / "text.txt").write_text("\n\n".join(documents(length=900)))
        options = ("--out", tmp_path / "page.html", "--figure", "encoding", "--figure", "order")
        code, out, _ = run("report", f"mine={folder}", folder, *options, "--text", tmp_path / "text.txt")
        assert (code, out.split()) == (0, [str(tmp_path / "page.html"), str(tmp_path / "page.html.json")])
        data = json.loads((tmp_path / "page.html.json").read_text(encoding="utf-8"))
        assert [model["name"] for model in data["models"]] == ["mine", "model"]
        assert list(data["figures"]) == ["encoding", "order"] and data["figures"]["order"]["models"]["mine"]["data"]

    def test_a_figure_is_drawn_and_its_sentence_said(self, run, folder, tmp_path):
        code, out, _ = run("plot", "dimensions", folder, "--out", tmp_path / "shift.png")
        assert code == 0 and out.startswith(f"{tmp_path / 'shift.png'}: ") and len(out.splitlines()) == 1
        assert (tmp_path / "shift.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        "arguments, said",
        [
            (
                ("plot", "nonsense", "alibi", "--out", "x.png"),
                "there is no figure 'nonsense'; the figures are encoding,",
            ),
            (("plot", "encoding", "alibi", "--out", "x.pdf"), "x.pdf: the name of a figure must end in .png or .svg"),
            (("plot", "encoding", "{absent}", "--out", "x.png"), "absent"),
            (("plot", "dimensions", "{none}", "--out", "x.png"), "position_scheme is 'none'"),
            (("plot", "probes", "alibi", "--out", "x.png"), "alibi"),
            (("report", "alibi", "--out", "x.pdf"), "must end in .html"),
            (("report", "alibi", "--out", "x.html", "--figure", "nonsense"), "there is no figure 'nonsense'"),
            (("report", "alibi", "--out", "x.html", "--text", "{empty}"), "there is no text in"),
        ],
    )
    def test_what_is_wrong_is_said_in_one_line(self, arguments, said, run, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        build("none").save_pretrained(tmp_path / "none")
        (tmp_path / "empty.txt").write_text(" ")
        places = {"none": tmp_path / "none", "absent": tmp_path / "absent", "empty": tmp_path / "empty.txt"}
        code, out, err = run(*(argument.format(**places) for argument in arguments))
        assert code == 2 and out == "" and said in err.splitlines()[-1] and "Traceback" not in err
        assert not [path for path in tmp_path.iterdir() if path.name.startswith((".x", "x."))]

    @pytest.mark.slow
    def test_a_stock_model_is_read_too(self, run, tmp_path):
        BertModel(stock_config()).save_pretrained(tmp_path / "stock")
        assert run("plot", "encoding", tmp_path / "stock", "--out", tmp_path / "stock.png")[0] == 0

    @pytest.mark.slow
    def test_other_commands_do_without_matplotlib(self, tmp_path):
        code = "import sys, hf_posenc, hf_posenc_cli; print([name for name in sys.modules if name.startswith('matplotlib')])"
        assert run_fresh(code, tmp_path, plugin=True).strip() == "[]"
