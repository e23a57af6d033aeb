"""Edges that are planted in tables are found at their rows, tables without one have none, and MiniLM has its own."""

import numpy as np
import pytest
import tiny
import torch

from hf_posenc import analysis
from hf_posenc.analysis.edges import find_edge


ROWS, WIDTH = 512, 48


def draw(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH)


def walk(rows: int = ROWS) -> torch.Tensor:
    """Each row a step away from the one before."""
    return draw(rows).cumsum(0)


def planted(kind: str, row: int) -> torch.Tensor:
    """A table that begins to look different at a row."""
    before, table = torch.arange(ROWS)[:, None] < row, walk()
    if kind == "larger steps":
        return torch.where(before, draw(), 1.5 * draw()).cumsum(0)
    if kind == "smaller steps, and a row of its own where texts ended":
        table = torch.where(before, draw(), 0.7 * draw()).cumsum(0)
        table[row - 1] += 3 * draw(1)[0]
        return table
    return torch.where(before, table, {"rows of zeros": 0.0 * draw(), "rows never trained": 3 * draw()}[kind])


KINDS = (
    "larger steps",
    "smaller steps, and a row of its own where texts ended",
    "rows of zeros",
    "rows never trained",
)


class TestFindEdge:
    @pytest.mark.parametrize("row", [64, 128, 300])
    @pytest.mark.parametrize("kind", KINDS)
    def test_finds_what_is_planted(self, kind, row):
        edge = find_edge(planted(kind, row))
        assert abs(edge.row - row) <= (1 if kind == "larger steps" else 0)
        assert edge.count >= 400 and edge.others[0] <= 1 <= edge.others[1]
        assert not edge.others[0] <= edge.ratio <= edge.others[1]
        assert (edge.ratio > 1) == (kind in ("larger steps", "rows never trained"))

    @pytest.mark.parametrize(
        "table",
        [
            pytest.param(lambda: draw(), id="unrelated rows"),
            pytest.param(lambda: walk(), id="walk"),
            pytest.param(lambda: (draw() * torch.linspace(1, 4, ROWS)[:, None]).cumsum(0), id="slow change"),
            pytest.param(lambda: torch.outer(torch.arange(ROWS), torch.rand(WIDTH)).sin(), id="sinusoids"),
            pytest.param(lambda: torch.zeros(ROWS, WIDTH), id="zeros"),
            pytest.param(lambda: planted("larger steps", 60)[:100], id="too few rows"),
            pytest.param(lambda: walk(1), id="one row"),
        ],
    )
    def test_finds_none_where_there_is_none(self, table):
        assert all(find_edge(table()) is None for _ in range(10))

    def test_the_ends_are_no_edges(self):
        """The first row of a learned table and its last ones are like no other."""
        table = walk()
        table[0] += 20 * draw(1)[0]
        table[-3:] += torch.tensor([1.0, 5.0, 20.0])[:, None] * draw(3)
        assert find_edge(table) is None


class TestMiniLM:
    """It was trained on 512 tokens, and then on 128."""

    def test_has_an_edge_where_its_last_training_ended_and_says_so(self, minilm):
        data = analysis.position_similarity(minilm)
        edge, vectors = data.edge, analysis.study(minilm).position_vectors().double()
        steps = (vectors[1:] - vectors[:-1]).norm(dim=1).numpy()
        assert edge.row == 128 and edge.to_dict()["row"] == 128
        assert edge.before == pytest.approx(np.median(steps[109:125]))
        assert edge.after == pytest.approx(np.median(steps[128:144]))
        assert edge.ratio == pytest.approx(edge.after / edge.before) and edge.ratio > 1.15 > 1.05 > edge.others[1]
        said = analysis.describe_position_similarity(data)
        assert "From row 128 on the rows look different" in said and f"at {edge.count} other rows" in said
        left = analysis.plot_position_similarity(data).axes[0]
        assert [line.get_xdata()[0] for line in left.lines][0] == 127.5 and "edge at 128" in left.get_title("left")

    def test_has_none_in_the_parts_of_its_table_or_in_another_order(self, minilm):
        vectors = analysis.study(minilm).position_vectors()
        for part in (vectors[128:], vectors[: ROWS // 4], vectors[torch.randperm(ROWS)]):
            assert find_edge(part) is None

    def test_the_glance_of_a_report_has_it(self, minilm):
        made = analysis.report(f"MiniLM={minilm}", tiny.build("absolute"), figures=["similarity"], progress=False)
        assert dict(made.glance())["Rows of the position embedding matrix look different from"] == ["row 128", "–"]


def test_a_model_without_an_edge_says_nothing_of_it():
    data = analysis.position_similarity(tiny.build("absolute"))
    assert data.edge is None and data.to_dict()["edge"] is None
    assert "look different" not in analysis.describe_position_similarity(data)
    assert not analysis.plot_position_similarity(data).axes[0].lines
