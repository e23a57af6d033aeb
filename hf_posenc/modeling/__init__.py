"""All that is saved with a checkpoint, and nothing else: `torch_state`, `constants` and `stock_interface`, `schemes`, `kernels` and `models`, each
importing those before it alone."""
