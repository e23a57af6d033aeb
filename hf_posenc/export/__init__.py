"""Models in forms that need no hf_posenc: as architectures of Transformers itself (`stock`), and as files for ONNX Runtime (`onnx`)."""
