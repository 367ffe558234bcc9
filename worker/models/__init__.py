"""Model families, one file each, and the way from a configuration to a loaded model.

Owns the decoder interface (`interfaces.py`), the registry and the families.
In: a `PretrainedConfig`, layers, and weights from `weights/`.
Out: a stage of a model: embed, layers a to b, head.
docs/adding-a-model.md adds a family.
"""
