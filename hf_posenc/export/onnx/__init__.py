"""Models as files for ONNX Runtime: `exporting` writes them, `attention` is the attention that is traced, and `graph` transforms the traced graph."""
