"""The file: functions of a few nodes that are in it, equal nodes merged, and what is constant computed."""

from collections.abc import Iterator


OPSET = 20
# Own functions in the file, and ONNX Runtime's operators.
OWN, CONTRIB = "hf_posenc", "com.microsoft"
KINDS = (("Query",), ("Key",), ("Query", "Key"))
PAIR_ROWS = "PairRows"


def _node(kind: str, inputs: str, outputs: str, domain: str = "", **attributes):
    from onnx import helper

    return helper.make_node(kind, inputs.split(), outputs.split(), domain=domain, **attributes)


def _constant(name: str, *values: int, scalar: bool = False):
    from onnx import TensorProto, helper

    tensor = helper.make_tensor(name, TensorProto.INT64, [] if scalar else [len(values)], values)
    return helper.make_node("Constant", [], [name], value=tensor)


def _choice(output: str, kind: int, short: list, long: list):
    """An `If` of two lists of nodes, whose last ones make the result: where the distances are no more than the rows of the table, or more."""
    from onnx import helper

    branches = {
        f"{name}_branch": helper.make_graph(
            nodes, name, [], [helper.make_tensor_value_info(nodes[-1].output[0], kind, None)]
        )
        for name, nodes in (("then", short), ("else", long))
    }
    return helper.make_node("If", ["is_short"], [output], **branches)


def _function(name: str, inputs: list[str], output: str, nodes: list):
    from onnx import helper

    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_function(OWN, name, inputs, [output], nodes, opsets)


def _is_short(table: str, axis: int) -> list:
    """Nodes that say whether twice the length is no more than the rows of a table, given `length`."""
    sizes = {"start": axis} if axis == -1 else {"start": axis, "end": axis + 1}
    return [
        _constant("two", 2),
        _node("Shape", table, "table_rows", **sizes),
        _node("Mul", "length two", "width"),
        _node("LessOrEqual", "width table_rows", "fits"),
        _node("Squeeze", "fits", "is_short"),
    ]


def _pair_rows_function():
    """`PairRows`: the row of each pair, int32 (batch, heads, length, length), where [`_score_function`] gathers; else a 0.

    Inputs: rows (2 · length - 1,), tokens (batch, 1, 1, length), per_head (heads,), per_row (rows of the table,).
    """
    from onnx import TensorProto

    nodes = [_node("Shape", "tokens", "length", start=3, end=4), *_is_short("per_row", -1)]
    nothing = [_constant("none", 0), _node("Cast", "none", "no_rows", to=TensorProto.INT32)]
    pairs = [
        _constant("zero", 0),
        _constant("one", 1),
        _constant("scalar_zero", 0, scalar=True),
        _constant("scalar_one", 1, scalar=True),
        _node("Squeeze", "length", "scalar_length"),
        _node("Range", "scalar_zero scalar_length scalar_one", "places"),
        _node("Unsqueeze", "places one", "queries"),
        _node("Unsqueeze", "places zero", "keys"),
        _node("Sub", "keys queries", "distances"),
        _node("Sub", "length one", "shift"),
        _node("Add", "distances shift", "at"),
        _node("Cast", "rows", "narrow_rows", to=TensorProto.INT32),
        _node("Gather", "narrow_rows at", "rows_of_pairs", axis=0),
        _node("Shape", "tokens", "batch", start=0, end=1),
        _node("Shape", "per_head", "heads"),
        _node("Concat", "batch heads length length", "sizes", axis=0),
        _node("Expand", "rows_of_pairs sizes", "all_rows"),
    ]
    nodes.append(_choice("pair_rows", TensorProto.INT32, nothing, pairs))
    return _function(PAIR_ROWS, ["rows", "tokens", "per_head", "per_row"], "pair_rows", nodes)


def _score_function(kinds: tuple[str, ...]):
    """The function of ONNX that computes a term's scores: `QueryScores`, `KeyScores`, `QueryKeyScores`.

    Where the table has as many rows as there are distances, it is laid out by distance, multiplied with, and the products are moved by the
    relative shift: a line of 2 · length numbers, read on as if it had one number less. With more distances than rows, products with
    the whole table are gathered per pair.
    """
    from onnx import TensorProto

    first = kinds[0].lower()
    nodes = [
        _constant("zero", 0),
        _constant("one", 1),
        _constant("minus_one", -1),
        _constant("large", 1 << 62),
        _node("Shape", first, "length", start=2, end=3),
        *_is_short(f"{first}_table", -2),
        _node("Sub", "length one", "shift"),
    ]
    shifted = [
        _constant("flat", 0, 0, -1),
        _constant("leading", 0, 0),
        _constant("small", -(1 << 62)),
        _node("Concat", "leading length minus_one", "skewed", axis=0),
    ]
    gathered = []
    ends: dict[str, list[str]] = {"shifted": [], "gathered": []}
    for kind in kinds:
        name, rows = kind.lower(), "rows"
        if kind == "Key":
            # Laid out per key and query: the distances are seen from the other side.
            rows = "reversed_rows"
            shifted.append(_node("Slice", "rows minus_one small zero minus_one", rows))
        shifted += [
            # A row once more, so that lines are even; nobody reads what comes of it.
            _node("Slice", "rows zero one zero", f"{name}_end"),
            _node("Concat", f"{rows} {name}_end", f"{name}_rows", axis=0),
            _node("Gather", f"{name}_table {name}_rows", f"{name}_laid", axis=-2),
            _node("FusedMatMul", f"{name} {name}_laid", f"{name}_products", CONTRIB, transB=1),
            _node("Reshape", f"{name}_products flat", f"{name}_line"),
            _node("Slice", f"{name}_line shift minus_one minus_one", f"{name}_cut"),
            _node("Reshape", f"{name}_cut skewed", f"{name}_lines"),
            _node("Slice", f"{name}_lines zero length minus_one", f"{name}_shifted"),
        ]
        if kind == "Key":
            shifted.append(_node("Transpose", "key_shifted", "key_transposed", perm=[0, 1, 3, 2]))
        # (batch, heads, query, rows), or (batch, heads, rows, key): the same pairs find the same rows.
        factors, axis = ("query query_table", -1) if kind == "Query" else ("key_table key", -2)
        gathered += [
            _node("FusedMatMul", factors, f"{name}_by_row", CONTRIB, transB=1),
            _node("GatherElements", f"{name}_by_row pair_rows", f"{name}_gathered", axis=axis),
        ]
        ends["shifted"].append("key_transposed" if kind == "Key" else "query_shifted")
        ends["gathered"].append(f"{name}_gathered")
    for way, branch in (("shifted", shifted), ("gathered", gathered)):
        branch.append(_node("Add" if len(kinds) > 1 else "Identity", " ".join(ends[way]), f"scores_{way}"))
    nodes.append(_choice("scores", TensorProto.FLOAT, shifted, gathered))
    inputs = ["rows", "pair_rows", *(name for kind in kinds for name in (kind.lower(), f"{kind.lower()}_table"))]
    return _function(f"{''.join(kinds)}Scores", inputs, "scores", nodes)


def own_functions() -> list:
    return [_pair_rows_function(), *map(_score_function, KINDS)]


def merge_equal_nodes(program) -> None:
    """Let what several layers compute alike be computed once: equal small constants, and equal nodes of equal inputs."""
    import onnx_ir
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass, DeduplicateInitializersPass

    model = onnx_ir.from_proto(program)
    for merge in (DeduplicateInitializersPass(size_limit=64), CommonSubexpressionEliminationPass()):
        model = merge(model).model
    program.CopyFrom(onnx_ir.to_proto(model))


def declare_domains(program) -> None:
    from onnx import helper

    declared = {entry.domain for entry in program.opset_import}
    program.opset_import.extend(helper.make_opsetid(name, 1) for name in (OWN, CONTRIB) if name not in declared)


def constant_nodes(program) -> list:
    """The nodes of a model's graph that depend on no input, without `Constant`, in their order."""
    known = {tensor.name for tensor in program.graph.initializer}
    found = []
    for node in program.graph.node:
        names = [name for name in node.input if name]
        if node.op_type == "Constant" or (names and all(name in known for name in names)):
            known.update(node.output)
            if node.op_type != "Constant":
                found.append(node)
    return found


def fold_constants(program) -> None:
    """Compute what depends on no input, by ONNX Runtime, and insert the numbers instead."""
    import onnxruntime
    from onnx import helper, numpy_helper

    graph = program.graph
    folded = constant_nodes(program)
    if not folded:
        return
    own = {id(node) for node in folded}
    made = {name for node in folded for name in node.output if name}
    rest = [node for node in graph.node if id(node) not in own]
    # What subgraphs read has the outer names.
    read = {name for node in rest for name in _names_read(node)} | {output.name for output in graph.output}
    wanted = sorted(made & read)
    constants = [node for node in graph.node if node.op_type == "Constant"]
    outputs = [helper.make_empty_tensor_value_info(name) for name in wanted]
    of_part = {name for node in folded for name in node.input}
    given = [tensor for tensor in graph.initializer if tensor.name in of_part]
    part = helper.make_graph([*constants, *folded], "constants", [], outputs, initializer=given)
    session = onnxruntime.InferenceSession(
        helper.make_model(part, opset_imports=program.opset_import, ir_version=program.ir_version).SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    values = session.run(wanted, {})
    del graph.node[:]
    graph.node.extend(rest)
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in zip(wanted, values))
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _names_read(node) -> Iterator[str]:
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from _names_read(inner)
