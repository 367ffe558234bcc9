"""The candidates of each demo model: what the sweep trains and chooses from."""

from __future__ import annotations

from dataclasses import dataclass

from network import Shape

DEEP = Shape(hidden=256, layers=8, heads=8, kv_heads=4, head_size=32, intermediate=512)
WIDE = Shape(hidden=256, layers=6, heads=8, kv_heads=4, head_size=32, intermediate=768)
DRAFT_96 = Shape(hidden=96, layers=2, heads=4, kv_heads=4, head_size=32, intermediate=224)
DRAFT_80 = Shape(hidden=80, layers=3, heads=4, kv_heads=4, head_size=32, intermediate=192)
DRAFT_64 = Shape(hidden=64, layers=6, heads=4, kv_heads=4, head_size=16, intermediate=192)
EXPERTS_8 = Shape(
    hidden=128, layers=4, heads=4, kv_heads=4, head_size=32, intermediate=64, num_experts=8
)
EXPERTS_8_WIDE = Shape(
    hidden=128, layers=4, heads=4, kv_heads=4, head_size=32, intermediate=80, num_experts=8
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One candidate: a shape and its training."""

    name: str
    model: str
    shape: Shape
    optimizer: str
    """``adamw``, or ``muon``: Muon for the layers' matrices, AdamW for the rest."""

    learning_rate: float
    dropout: float
    passes: int
    """Passes over the training text after which the learning rate has fallen to nothing."""

    weight_decay: float = 0.1
    rows: int = 32
    """Rows of 1,024 tokens in a step."""


def _recipe(
    model: str,
    shape: Shape,
    optimizer: str,
    rate: float,
    dropout: float,
    passes: int,
    **other: float,
) -> Recipe:
    sizes = f"h{shape.hidden}l{shape.layers}i{shape.intermediate}"
    extra = "".join(f"-{key[:2]}{value}" for key, value in other.items())
    name = f"{model}-{sizes}-{optimizer}-lr{rate}-do{dropout}-p{passes}{extra}"
    return Recipe(
        name=name,
        model=model,
        shape=shape,
        optimizer=optimizer,
        learning_rate=rate,
        dropout=dropout,
        passes=passes,
        **other,  # type: ignore[arg-type]
    )


RECIPES = [
    _recipe("base", DEEP, "adamw", 2e-3, 0.1, 16),
    _recipe("base", DEEP, "adamw", 3e-3, 0.2, 24),
    _recipe("base", DEEP, "muon", 3e-3, 0.1, 12),
    _recipe("base", DEEP, "muon", 3e-3, 0.2, 20),
    _recipe("base", DEEP, "adamw", 3e-3, 0.15, 20, weight_decay=0.5),
    _recipe("base", DEEP, "muon", 3e-3, 0.15, 16, weight_decay=0.5),
    _recipe("base", WIDE, "muon", 3e-3, 0.2, 20),
    _recipe("draft", DRAFT_96, "adamw", 4e-3, 0.0, 30),
    _recipe("draft", DRAFT_96, "muon", 4e-3, 0.0, 30),
    _recipe("draft", DRAFT_80, "muon", 4e-3, 0.0, 30),
    _recipe("draft", DRAFT_64, "muon", 4e-3, 0.0, 30),
    _recipe("moe", EXPERTS_8, "adamw", 3e-3, 0.05, 20),
    _recipe("moe", EXPERTS_8_WIDE, "muon", 3e-3, 0.05, 20),
    _recipe("moe", EXPERTS_8_WIDE, "muon", 3e-3, 0.1, 24),
]
