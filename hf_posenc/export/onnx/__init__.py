"""Models as files for ONNX Runtime: `exporting` writes them, `attention` is what is recorded, `graph` what is made of that."""
