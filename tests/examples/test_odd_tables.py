"""Tables as they come: from another system, with patterns in their names, with lists where texts are expected."""

import pytest
from data_files import check_single, read_table
from datasets import Dataset


@pytest.mark.parametrize("name", ["mixed.csv", "mixed.tsv"])
def test_ends_of_lines_of_two_systems_are_no_part_of_labels(name, tmp_path):
    cut = "," if name.endswith("csv") else "\t"
    file = tmp_path / name
    file.write_bytes(f"text{cut}label\na{cut}good\r\nb{cut}bad\n".encode())
    assert read_table(str(file))["label"] == ["good", "bad"]


@pytest.mark.parametrize("name", ["c[1].csv", "c[1].jsonl"])
def test_a_file_whose_name_is_a_pattern_is_the_one_that_is_read(name, tmp_path):
    rows = {"csv": "text,label\n{0},{0}\n", "jsonl": '{{"text": "{0}", "label": "{0}"}}\n'}[name.rpartition(".")[2]]
    (tmp_path / name.replace("[1]", "1")).write_text(rows.format("other"))
    (tmp_path / name).write_text(rows.format("own"))
    assert read_table(str(tmp_path / name))["text"] == ["own"]


def test_lists_are_no_texts():
    with pytest.raises(ValueError, match=r"the train data have \['a'\] as text in row 1"):
        check_single({"train": Dataset.from_list([{"text": ["a"]}])}, ["text"])
