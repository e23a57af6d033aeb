"""The graph of the file: its functions added, equal nodes merged, and what is constant computed."""

from collections.abc import Iterator


OPSET = 20
# Own functions in the file, and ONNX Runtime's operators.
OWN, CONTRIB = "hf_posenc", "com.microsoft"
PAIR_ROWS = "PairRows"


def add_own_functions(program) -> None:
    """Put the functions of [`functions`] into a model."""
    from .functions import FUNCTIONS

    program.functions.extend(function.to_function_proto() for function in FUNCTIONS)


def merge_equal_nodes(program) -> None:
    """Let what several layers compute alike be computed once: equal small constants, and equal nodes of equal inputs.

    Functions that nothing calls are left out.
    """
    import onnx_ir
    from onnx_ir.passes import common

    model = onnx_ir.from_proto(program)
    for step in (
        common.RemoveUnusedFunctionsPass(),
        common.DeduplicateInitializersPass(size_limit=64),
        common.CommonSubexpressionEliminationPass(),
    ):
        model = step(model).model
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
