"""Text comes from files, folders, data sets or Python itself; what is measured on was not learned from."""

import datasets
import pytest
import tiny_checkpoints
import torch

from hf_posenc.conversion import digests, texts
from hf_posenc.conversion.texts import Windows, held_out_apart, read_documents


class TestReadDocuments:
    def test_by_default_python_speaks(self):
        documents = read_documents()
        assert len(documents) > 50 and sum(map(len, documents)) > 300_000

    def test_files_and_folders_are_documents_of_their_own(self, tmp_path):
        (tmp_path / "folder" / "deep").mkdir(parents=True)
        for name, content in {"a.txt": "A", "deep/b.md": "B", "c.py": "C", "deep/d.rst": "D"}.items():
            (tmp_path / "folder" / name).write_text(content)
        (tmp_path / "one.log").write_text("L")
        assert sorted(read_documents([tmp_path / "folder", tmp_path / "one.log"])) == ["A", "B", "D", "L"]

    def test_rows_of_a_data_set(self, monkeypatch):
        asked = []

        def load_dataset(*arguments, **keywords):
            asked.append((arguments, keywords))
            return datasets.Dataset.from_dict({"text": ["one", "two"]})

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        assert read_documents(["some/name:config"]) == ["one", "two"]
        assert asked == [(("some/name", "config"), {"split": "train", "streaming": True})]

    def test_rows_of_a_file(self, tmp_path):
        (tmp_path / "rows.jsonl").write_text('{"text": "one", "n": 1}\n{"text": "two\\nlines", "n": 2}\n')
        assert read_documents([tmp_path / "rows.jsonl"]) == ["one", "two\nlines"]
        # A name is no pattern.
        (tmp_path / "rows1.jsonl").write_text('{"text": "other"}\n')
        for name in ("rows[1].jsonl", "row?1.jsonl", "*1.jsonl"):
            (tmp_path / name).write_text('{"text": "mine"}\n')
            assert read_documents([tmp_path / name]) == ["mine"]
        (tmp_path / "others.jsonl").write_text('{"words": "one"}\n')
        with pytest.raises(ValueError, match=r"others.jsonl has no column 'text' of strings; it has words"):
            read_documents([tmp_path / "others.jsonl"])
        (tmp_path / "gap.jsonl").write_text('{"text": "one"}\n{"text": null}\n')
        with pytest.raises(ValueError, match=r"gap.jsonl has no text in row 2: 'text' is None"):
            read_documents([tmp_path / "gap.jsonl"])
        (tmp_path / "empty.jsonl").touch()
        with pytest.raises(ValueError, match="no text in"):
            read_documents([tmp_path / "empty.jsonl"])

    def test_a_name_that_is_nothing_is_named(self, monkeypatch):
        def load_dataset(*arguments, **keywords):
            raise ConnectionError("the Hub is far away")

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(
            FileNotFoundError, match="no file or folder nowhere, and no data set .* the Hub is far away"
        ):
            read_documents(["nowhere"])

    def test_no_more_is_read_than_the_limit(self, tmp_path, monkeypatch):
        monkeypatch.setattr(texts, "BLOCK_CHARACTERS", 7)
        for name in "abc":
            (tmp_path / f"{name}.txt").write_text(f"{name}\n" * 3)
        assert read_documents([tmp_path]) == ["a\n" * 3, "b\n"]

    @pytest.mark.parametrize(
        "name, content, error, said",
        [
            ("empty.txt", b" \n", ValueError, "no text in"),
            ("binary.txt", b"\xff\xfe\x00", ValueError, "not text in UTF-8"),
            ("folder", None, ValueError, "has no files that end in"),
            ("missing.txt", b"", FileNotFoundError, "no file or folder"),
        ],
    )
    def test_what_is_no_text_is_an_error(self, name, content, error, said, tmp_path):
        path = tmp_path / name
        if content is None:
            path.mkdir()
        elif content:
            path.write_bytes(content)
        with pytest.raises(error, match=said):
            read_documents([path])


class TestHeldOut:
    def test_is_every_tenth_document(self):
        documents = [str(number) for number in range(30)]
        train, held_out = held_out_apart(documents)
        assert held_out == ["5", "15", "25"]
        assert sorted(train + held_out) == sorted(documents)

    def test_few_documents_are_cut_where_lines_begin(self):
        document = "".join(f"line {number}\n" for number in range(1000))
        train, held_out = held_out_apart([document])
        assert not {*"".join(train).splitlines()} & {*"".join(held_out).splitlines()}
        assert sorted("".join(train + held_out).splitlines()) == sorted(document.splitlines())
        assert 0.05 < len("".join(held_out)) / len(document) < 0.15

    @pytest.mark.parametrize("documents", [1, 3])
    @pytest.mark.parametrize(
        ("word", "between"),
        [("w{}", " "), ("w{}", "\t "), ("{}", ""), ("w{}", "\u3000")],
        ids=["words", "tabs", "none", "wide"],
    )
    def test_long_lines_are_cut_between_words(self, word, between, documents):
        """... and where nothing separates words, anywhere."""
        lines = [
            between.join(word.format(number) for number in range(n, n + 3000))
            for n in range(0, 3000 * documents, 3000)
        ]
        train, held_out = held_out_apart(lines)
        assert sorted("".join(train + held_out)) == sorted("".join(lines))
        assert 0.05 < len("".join(held_out)) / len("".join(lines)) < 0.15
        if between:
            words = [{*"\n".join(part).split()} for part in (train, held_out)]
            assert not words[0] & words[1] and words[0] | words[1] == {*" ".join(lines).split()}

    def test_a_long_line_among_short_ones_is_cut(self):
        document = "first\n" + "word " * 2000 + "\nlast\n"
        train, held_out = held_out_apart([document])
        assert sorted("".join(train + held_out)) == sorted(document) and 500 < len("".join(held_out)) < 2000

    def test_words_stay_whole_in_a_short_text(self):
        train, held_out = held_out_apart(["some words of one line"])
        assert " ".join([*train, *held_out]).split() and {*" ".join([*train, *held_out]).split()} == {
            *"some words of one line".split()
        }


LINES = {
    "a text of lines": tiny_checkpoints.text(20),
    "one line": " ".join(tiny_checkpoints.text(20).split()),
    "lines of a few words": "\n".join(tiny_checkpoints.text(20).split()),
    "short and long": "w5 w6\n" + " ".join(tiny_checkpoints.text(20).split()) + "\nw7 w8 w9\n",
}


class TestWindows:
    @pytest.fixture
    def windows(self):
        tokenizer = tiny_checkpoints.tokenizer(length=8)
        tokenizer.backend_tokenizer.enable_truncation(4)
        tokenizer.backend_tokenizer.enable_padding(length=9)
        return Windows(["w5 w6 w7\n\nw8 w9 w10 w11 w12 w13 w14 w15 w16 w17\n", "w18 w19"], tokenizer)

    def test_keeps_all_tokens_whatever_the_tokenizer_cuts_or_pads(self, windows):
        assert windows.tokens.tolist() == [*range(5, 20)]
        assert windows.line_starts.tolist() == windows.starts.tolist() == [0, 3, 13]

    def test_draws_whole_windows_that_begin_with_a_line_or_end_with_the_text(self, windows):
        batch = windows.draw(12, 50, torch.Generator().manual_seed(0))
        rows = {tuple(row) for row in batch["input_ids"].tolist()}
        # The second line is as long as a window; the third is followed by too little.
        assert rows == {(1, *range(5, 15), 2), (1, *range(8, 18), 2), (1, *range(10, 20), 2)}
        assert batch["attention_mask"].all()

    def test_a_line_that_is_longer_than_a_window_has_several(self, windows):
        batch = windows.draw(6, 100, torch.Generator().manual_seed(0))
        assert {row[1] for row in batch["input_ids"].tolist()} == {5, 8, 12, 16}

    @pytest.mark.parametrize("length", [16, 17, 32, 100])
    @pytest.mark.parametrize("documents", [1, 4])
    @pytest.mark.parametrize("text", LINES)
    def test_every_token_may_be_drawn(self, text, documents, length, monkeypatch):
        windows = Windows(documents * [LINES[text]], tiny_checkpoints.tokenizer())
        number = len(windows.tokens)
        windows.tokens = torch.arange(number)  # each says where it stands
        monkeypatch.setattr(torch, "randint", lambda number, size, generator: torch.arange(number))  # each window once
        drawn = torch.bincount(windows.draw(length, 1, None)["input_ids"][:, 1:-1].flatten(), minlength=number)
        assert (drawn > 0).all()
        if text == "one line":  # and as often as others, but where a line ends
            assert drawn.max() <= documents + 1 and (drawn == 1).float().mean() > 0.5

    def test_spreads_windows_that_do_not_overlap(self, windows):
        batch = windows.evenly_spaced(6, 100)
        assert batch["input_ids"][:, 1:-1].flatten().unique().numel() == batch["input_ids"][:, 1:-1].numel() == 12

    def test_cuts_and_pads_lines(self, windows):
        batch = windows.lines(6, 3, least=2)
        assert batch["input_ids"].tolist() == [[1, 5, 6, 7, 2, 0], [1, 8, 9, 10, 11, 2], [1, 18, 19, 2, 0, 0]]
        assert batch["attention_mask"].sum(1).tolist() == [5, 6, 4]

    def test_where_lines_are_few_what_is_cut_off_is_one_too(self, windows):
        batch = windows.lines(6, 100, least=2)
        rows = [[id for id in row if id > 4] for row in batch["input_ids"].tolist()]
        assert rows == [[5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17], [18, 19]]

    def test_other_words_other_lines_and_other_ends_have_other_digests(self):
        tokenizer = tiny_checkpoints.tokenizer()

        def digest(text: str, first: int = 1) -> str:
            windows = Windows([text], tokenizer)
            windows.first = first
            return digests.of_text(windows)

        text = "w5 w6\nw7 w8"
        assert digest(text) == digest("w5  w6\n\nw7 w8\n")
        assert len({digest(text), digest("w5 w6\nw7 w9"), digest("w5\nw6 w7 w8"), digest(text, first=3)}) == 4
