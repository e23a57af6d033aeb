"""Functions of ONNX that are saved in the file: a term's scores by tables of distances. onnxscript translates what is written here.

Where a table has as many rows as there are distances, it is laid out by distance, multiplied with, and the products are moved by the
relative shift. With more distances than rows, products with the whole table are gathered per pair.

Inputs: rows (2 · length - 1,), the row of each distance; query and key (batch, heads, length, head_dim); their tables (heads or 1,
rows, head_dim); pair_rows, what `PairRows` makes. Scores are (batch, heads, length, length).
"""

from onnx import TensorProto
from onnxscript import opset20 as op
from onnxscript import script
from onnxscript.values import Opset

from .graph import CONTRIB, OWN


own, runtime = Opset(OWN, 1), Opset(CONTRIB, 1)
INT32 = TensorProto.INT32


@script(own)
def IsShort(length, table):
    """Whether there are no more distances than rows in a table."""
    return op.Squeeze(length + length <= op.Shape(table, start=-2, end=-1))


@script(own)
def PairRows(rows, tokens, per_head, per_row):
    """The row of each pair, int32 (batch, heads, length, length), where scores are gathered; else a 0.

    Inputs that are here for their sizes: tokens (batch, 1, 1, length), per_head (heads,), per_row (rows of the table,).
    """
    length = op.Shape(tokens, start=3, end=4)
    if op.Squeeze(length + length <= op.Shape(per_row)):
        pair_rows = op.Cast([0], to=INT32)
    else:
        places = op.Range(0, op.Squeeze(length), 1)
        distances = op.Unsqueeze(places, [0]) - op.Unsqueeze(places, [1])
        by_pair = op.Gather(op.Cast(rows, to=INT32), distances + (length - [1]), axis=0)
        sizes = op.Concat(op.Shape(tokens, start=0, end=1), op.Shape(per_head), length, length, axis=0)
        pair_rows = op.Expand(by_pair, sizes)
    return pair_rows


@script(own)
def Shifted(states, table, rows, length):
    """Products with the row of each distance: a line of 2 · length numbers, read on as if it had one number less."""
    # A row once more, so that lines are even; nobody reads what comes of it.
    laid_out = op.Gather(table, op.Concat(rows, op.Slice(rows, [0], [1]), axis=0), axis=-2)
    line = op.Reshape(runtime.FusedMatMul(states, laid_out, transB=1), [0, 0, -1])
    cut = op.Slice(line, length - [1], [-1], [-1])
    return op.Slice(op.Reshape(cut, op.Concat([0, 0], length, [-1], axis=0)), [0], length, [-1])


@script(own)
def ShiftedKeys(key, key_table, rows, length):
    """The same, laid out per key and query: the distances are seen from the other side."""
    reversed_rows = op.Slice(rows, [-1], [-9223372036854775807], [0], [-1])
    return op.Transpose(Shifted(key, key_table, reversed_rows, length), perm=[0, 1, 3, 2])


@script(own)
def GatheredQueries(query, query_table, pair_rows):
    return op.GatherElements(runtime.FusedMatMul(query, query_table, transB=1), pair_rows, axis=-1)


@script(own)
def GatheredKeys(key, key_table, pair_rows):
    """Of products (batch, heads, rows, key): the same pairs find the same rows."""
    return op.GatherElements(runtime.FusedMatMul(key_table, key, transB=1), pair_rows, axis=-2)


@script(own)
def QueryScores(rows, pair_rows, query, query_table):
    length = op.Shape(query, start=2, end=3)
    if IsShort(length, query_table):
        scores = Shifted(query, query_table, rows, length)
    else:
        scores = GatheredQueries(query, query_table, pair_rows)
    return scores


@script(own)
def KeyScores(rows, pair_rows, key, key_table):
    length = op.Shape(key, start=2, end=3)
    if IsShort(length, key_table):
        scores = ShiftedKeys(key, key_table, rows, length)
    else:
        scores = GatheredKeys(key, key_table, pair_rows)
    return scores


@script(own)
def QueryKeyScores(rows, pair_rows, query, query_table, key, key_table):
    length = op.Shape(query, start=2, end=3)
    if IsShort(length, query_table):
        scores = Shifted(query, query_table, rows, length) + ShiftedKeys(key, key_table, rows, length)
    else:
        by_query = GatheredQueries(query, query_table, pair_rows)
        scores = by_query + GatheredKeys(key, key_table, pair_rows)
    return scores


FUNCTIONS = (
    PairRows,
    QueryScores,
    KeyScores,
    QueryKeyScores,
    IsShort,
    Shifted,
    ShiftedKeys,
    GatheredQueries,
    GatheredKeys,
)
