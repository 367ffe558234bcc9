"""An engine's configuration, read and checked before any rank starts; free of torch.

Owns engine limits, parallel sizes, pretrained configurations and model folders on disk.
In: flags, `config.json` files and the headers of weight files.
Out: frozen dataclasses (`EngineConfig`, `PretrainedConfig`, `EngineFolder`).
Errors are `ConfigError`s that name the value, the limit and the remedy.
"""
