"""Trains heads that draft for a Llama: an EAGLE-3 head, Medusa heads, or both.

    .venv/bin/python examples/draft_heads/train.py --model examples/demo_models/base \\
        --text books.txt --output /tmp/heads

The heads learn the target's own distributions over the ids of a text, since drafts are accepted
where they are the target's choice. Each step takes rows of the text in random order. The last
fiftieth of the text is held out: the printed lengths are the tokens of a verification that
greedy chains would reach there.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from networks import EagleHead, MedusaHeads
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

SEED = 1234
HELD_OUT = 50
STEP_WEIGHT = 0.8
"""Weight of each further step of a chain in the loss."""

WARMUP = 0.05


class Rows:
    """The ids of a text, cut into rows."""

    def __init__(self, ids: Tensor, length: int, rows: int, device: torch.device) -> None:
        self._ids = ids.to(device)
        self._length, self._rows = length, rows
        self._generator = torch.Generator().manual_seed(SEED)
        num_held_out = max(len(ids) // HELD_OUT, length)
        self._end = len(ids) - num_held_out

    def next(self) -> Tensor:
        """Random rows [R, L] of the training part."""
        most = self._end - self._length
        starts = torch.randint(most, (self._rows,), generator=self._generator)
        return self._at(starts)

    def held_out(self) -> Iterator[Tensor]:
        """The rows of the other part."""
        starts = torch.arange(self._end, len(self._ids) - self._length, self._length)
        for chunk in starts.split(self._rows):
            yield self._at(chunk)

    def _at(self, starts: Tensor) -> Tensor:
        places = starts[:, None] + torch.arange(self._length)
        return self._ids[places.to(self._ids.device)]


class Target:
    """The model that verifies, which is not trained."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.to(device).eval().requires_grad_(False)
        self.config = model.config
        count = self.config.num_hidden_layers
        self.taps = (2, count // 2, count - 3)

    @torch.no_grad()
    def run(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tapped states [R, L, taps * D], last states [R, L, D], and logits [R, L, V]."""
        result = self.model(ids, output_hidden_states=True, use_cache=False)
        states = result.hidden_states
        tapped = torch.cat([states[tap] for tap in self.taps], -1)
        return tapped, states[-1], result.logits


def chain_logits(
    head: nn.Module, target: Target, ids: Tensor, num_steps: int
) -> tuple[list[Tensor], Tensor]:
    """A head's logits [R, P, V] of each step, and the target's logits behind each token."""
    tapped, last, logits = target.run(ids)
    places = ids.shape[1] - num_steps - 1
    if isinstance(head, MedusaHeads):
        return head(last[:, :places]), logits
    embed = target.model.get_input_embeddings()
    steps = [embed(ids[:, step + 1 : step + 1 + places]) for step in range(num_steps)]
    return head(steps, tapped[:, :places]), logits


def loss_of(head: nn.Module, target: Target, ids: Tensor, num_steps: int) -> Tensor:
    """Cross-entropy against the target's distributions, over all steps of a chain."""
    found, logits = chain_logits(head, target, ids, num_steps)
    total = torch.zeros((), device=ids.device)
    for step, own in enumerate(found):
        wanted = logits[:, step + 1 : step + 1 + own.shape[1]]
        if isinstance(head, EagleHead):
            # Chances outside of the head's vocabulary are left out, not shared out.
            probabilities = wanted.softmax(-1)[..., head.ids]
        else:
            probabilities = wanted.softmax(-1)
        loss = -(probabilities * F.log_softmax(own, -1)).sum(-1).mean()
        total = total + STEP_WEIGHT**step * loss
    return total


@torch.no_grad()
def length_of(head: nn.Module, target: Target, rows: Rows, num_steps: int) -> float:
    """Mean tokens of a verification: accepted drafts and one token of the target."""
    total, count = 0.0, 0
    for ids in rows.held_out():
        found, logits = chain_logits(head, target, ids, num_steps)
        choice = logits.argmax(-1)
        is_right = torch.ones_like(found[0][..., 0], dtype=torch.bool)
        for step, own in enumerate(found):
            draft = own.argmax(-1)
            draft = head.ids[draft] if isinstance(head, EagleHead) else draft
            places = own.shape[1]
            if step:
                # The text goes on otherwise than the target would: such chains end.
                is_right &= (
                    choice[:, step : step + places] == ids[:, step + 1 : step + 1 + places]
                )
            is_right &= draft == choice[:, step + 1 : step + 1 + places]
            total += float(is_right.sum())
        count += is_right.numel()
    return 1 + total / count


def train(
    head: nn.Module, target: Target, rows: Rows, num_steps: int, args: argparse.Namespace
) -> None:
    """Train until the steps or the seconds are over."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.rate, betas=(0.9, 0.95))
    began = time.monotonic()
    for number in range(args.steps):
        done = max(number / args.steps, (time.monotonic() - began) / args.seconds)
        if done >= 1:
            break
        rate = min(1.0, (number + 1) / (WARMUP * args.steps)) * math.cos(done * math.pi / 2)
        for group in optimizer.param_groups:
            group["lr"] = args.rate * rate
        loss = loss_of(head, target, rows.next(), num_steps)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number % args.report == 0:
            seconds = time.monotonic() - began
            print(f"step {number}, {seconds:.0f} s: loss {loss.item():.3f}", flush=True)
    length = length_of(head, target, rows, num_steps)
    print(f"{type(head).__name__}: {length:.3f} tokens of a verification", flush=True)


def most_frequent(ids: Tensor, vocab_size: int, count: int) -> Tensor:
    """The ``count`` ids that the text has most often, in rising order."""
    counts = torch.bincount(ids, minlength=vocab_size)
    return counts.topk(min(count, vocab_size)).indices.sort().values


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--text", type=Path, required=True, help="a plain UTF-8 text")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--heads", default="eagle,medusa", help="which to train")
    parser.add_argument("--draft-vocab", type=int, default=2048, help="ids of the EAGLE-3 head")
    parser.add_argument("--chain", type=int, default=4, help="steps of an EAGLE-3 chain")
    parser.add_argument("--num-medusa-heads", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=1e9, help="for each kind of head")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--report", type=int, default=100, help="steps between two lines")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Train and write the heads."""
    args = parse_arguments()
    torch.manual_seed(SEED)
    device = torch.device(args.device)
    target = Target(args.model, device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lines = args.text.read_text(encoding="utf-8").splitlines(keepends=True)
    encoded = tokenizer(lines, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([each for line in encoded for each in line])
    rows = Rows(ids, args.length, args.rows, device)
    if "eagle" in args.heads:
        own = most_frequent(ids, target.config.vocab_size, args.draft_vocab)
        eagle = EagleHead(target.config, target.taps, own).to(device)
        train(eagle, target, rows, args.chain, args)
        eagle.save(args.output / "eagle")
    if "medusa" in args.heads:
        weight = target.model.get_output_embeddings().weight
        medusa = MedusaHeads(target.config, weight, args.num_medusa_heads).to(device)
        train(medusa, target, rows, args.num_medusa_heads, args)
        medusa.save(args.output / "medusa", str(args.model))


if __name__ == "__main__":
    main()
