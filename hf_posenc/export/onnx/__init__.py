"""Models as files for ONNX Runtime: `exporting` writes them, `attention` is the attention that is traced, `graph` transforms the traced
graph, and `functions` are what it calls."""
