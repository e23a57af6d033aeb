"""What hf_posenc changes in other libraries, and knows of them.

- `hooks`: transformers' base classes and registries understand the `position_*` options. What of transformers all this relies on
  stands in docs/design.md.
- `saving`: models that hold models with a position scheme are saved with a config that tells of it.
- `peft`: adapters hold position parameters.
- `unpadding`: original models leave padding out. `stock_attention`: original DeBERTa and MPNet compute by other backends than eager.
- `changes`: what is changed, so that it can be put back.
"""
