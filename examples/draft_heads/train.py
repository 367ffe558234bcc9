"""Trains heads that draft for a Llama: an EAGLE-3 head, Medusa heads, or both.

    .venv/bin/python examples/draft_heads/train.py --model examples/demo_models/base \\
        --text books.txt --output /tmp/heads --own-rows 8192

The heads learn the target's own distributions over the ids of rows, since drafts are accepted
where they are the target's choice. Rows are cut out of the text, or with --own-rows written by
the target itself: greedy outputs behind passages of the text and questions about the text. The
last fiftieth of the rows is held out: the printed lengths are the tokens of a verification that
greedy chains reach there.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from networks import EagleHead, MedusaHeads
from own_text import own_rows
from target import Target
from torch import Tensor, nn

SEED = 1234
HELD_OUT = 50
STEP_WEIGHT = 0.8
"""Weight of each further step of a chain in the loss."""

WARMUP = 0.05
"""Part of the steps or of the time in which the rate rises."""

# Shapes: M rows, R rows of a batch, L places of a row, P places at which chains begin, V ids of
# the head's vocabulary.


class Rows:
    """Rows of ids, in batches: random ones to train, and those that are held out."""

    def __init__(self, ids: Tensor, lengths: Tensor, batch: int, device: torch.device) -> None:
        """``ids`` [M, L], of which the first ``lengths`` [M] count."""
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(SEED))
        self._ids, self._lengths = ids[order].to(device), lengths[order].to(device)
        self._batch = batch
        self._generator = torch.Generator().manual_seed(SEED)
        self._end = len(ids) - max(1, len(ids) // HELD_OUT)

    def next(self) -> tuple[Tensor, Tensor]:
        """Random rows [R, L], and which of their places count."""
        return self._at(torch.randint(self._end, (self._batch,), generator=self._generator))

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The other rows."""
        for chunk in torch.arange(self._end, len(self._ids)).split(self._batch):
            yield self._at(chunk)

    def most_frequent(self, vocab_size: int, count: int) -> Tensor:
        """The ``count`` ids that the rows have most often, in rising order."""
        counts = torch.bincount(self._ids[self._counting(self._lengths)], minlength=vocab_size)
        found = counts.topk(min(count, vocab_size))
        share = float(found.values.sum() / counts.sum())
        print(f"{len(found.values)} ids are {100 * share:.2f} % of all", flush=True)
        return found.indices.sort().values

    def _at(self, chunk: Tensor) -> tuple[Tensor, Tensor]:
        chunk = chunk.to(self._ids.device)
        return self._ids[chunk], self._counting(self._lengths[chunk])

    def _counting(self, lengths: Tensor) -> Tensor:
        return torch.arange(self._ids.shape[1], device=lengths.device) < lengths[:, None]


def text_rows(target: Target, text: str, length: int) -> tuple[Tensor, Tensor]:
    """The ids of a text, cut into rows [M, L], all of whose places count."""
    encoded = target.tokenizer(text.splitlines(keepends=True), add_special_tokens=False)
    ids = torch.tensor([each for line in encoded["input_ids"] for each in line])
    rows = ids[: len(ids) // length * length].view(-1, length)
    return rows, torch.full((len(rows),), length)


def chain_logits(
    head: nn.Module, target: Target, ids: Tensor, num_steps: int
) -> tuple[list[Tensor], Tensor]:
    """A head's logits [R, P, V] of each step, and the target's logits behind each token."""
    tapped, last, logits = target.run(ids)
    places = ids.shape[1] - num_steps - 1
    with _mixed(target.device):
        if isinstance(head, MedusaHeads):
            return head(last[:, :places]), logits
        embed = target.model.get_input_embeddings()
        steps = [embed(ids[:, step + 1 : step + 1 + places]) for step in range(num_steps)]
        return head(steps, tapped[:, :places]), logits


def _mixed(device: torch.device) -> Any:
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.autocast("cuda", torch.bfloat16)


def loss_of(
    head: nn.Module, target: Target, batch: tuple[Tensor, Tensor], num_steps: int
) -> Tensor:
    """Cross-entropy against the target's distributions, over all steps of a chain."""
    ids, counting = batch
    found, logits = chain_logits(head, target, ids, num_steps)
    # Chances outside of the head's vocabulary are left out, not shared out.
    sums = logits.float().logsumexp(-1, keepdim=True)
    chances = (logits[..., head.ids].float() - sums).exp()
    total = torch.zeros((), device=ids.device)
    for step, own in enumerate(found):
        places = slice(step + 1, step + 1 + own.shape[1])
        loss = -(chances[:, places] * F.log_softmax(own.float(), -1)).sum(-1)
        total = total + STEP_WEIGHT**step * loss[counting[:, places]].mean()
    return total


@torch.no_grad()
def lengths_of(head: nn.Module, target: Target, rows: Rows, num_steps: int) -> list[float]:
    """For each step the share of chains that are right up to this step."""
    right, count = torch.zeros(num_steps), 0
    for ids, counting in rows.held_out():
        found, logits = chain_logits(head, target, ids, num_steps)
        choice = logits.argmax(-1)
        places = found[0].shape[1]
        is_right = counting[:, num_steps + 1 : num_steps + 1 + places].clone()
        count += int(is_right.sum())
        for step, own in enumerate(found):
            if step:
                # The text goes on otherwise than the target would: such chains end.
                is_right &= (
                    choice[:, step : step + places] == ids[:, step + 1 : step + 1 + places]
                )
            is_right &= head.ids[own.argmax(-1)] == choice[:, step + 1 : step + 1 + places]
            right[step] += float(is_right.sum())
    return [float(each) / count for each in right]


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
        rate = min(1.0, (done + 1e-3) / WARMUP) * math.cos(done * math.pi / 2)
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
    shares = lengths_of(head, target, rows, num_steps)
    listed = " ".join(f"{share:.3f}" for share in shares)
    name = type(head).__name__
    print(f"{name}: {1 + sum(shares):.3f} tokens of a verification: 1 + {listed}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a Hugging Face folder, or a GGUF file")
    add("--text", type=Path, required=True, help="a plain UTF-8 text")
    add("--output", type=Path, required=True)
    add("--heads", default="eagle,medusa", help="which to train")
    add("--own-rows", type=int, default=0, help="texts of the target; 0: rows of the text")
    add("--own-batch", type=int, default=1024, help="texts that the target writes at once")
    add("--own-seconds", type=float, default=1e9, help="after which no batch begins")
    add("--draft-vocab", type=int, default=2048, help="ids that heads can draft")
    add("--chain", type=int, default=4, help="steps of an EAGLE-3 chain")
    add("--num-medusa-heads", type=int, default=3)
    add("--medusa-layers", type=int, default=1, help="residual blocks of a Medusa head")
    add("--steps", type=int, default=4000)
    add("--seconds", type=float, default=1e9, help="for each kind of head")
    add("--rows", type=int, default=16, help="of a training step")
    add("--length", type=int, default=256, help="ids of a row")
    add("--rate", type=float, default=1e-3)
    add("--report", type=int, default=100, help="steps between two lines")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Train and write the heads."""
    args = parse_arguments()
    torch.manual_seed(SEED)
    device = torch.device(args.device)
    target = Target(args.model, args.output / "target", device)
    text = args.text.read_text(encoding="utf-8")
    if args.own_rows:
        sizes = args.own_rows, args.length, args.own_batch
        found = own_rows(target, text, *sizes, args.own_seconds)
    else:
        found = text_rows(target, text, args.length)
    rows = Rows(*found, args.rows, device)
    ids = rows.most_frequent(target.config.vocab_size, args.draft_vocab)
    weight = target.model.get_output_embeddings().weight
    if "eagle" in args.heads:
        eagle = EagleHead(target.config, target.taps, ids).to(device)
        eagle.begin_as(target.model.model.norm.weight, weight)
        train(eagle, target, rows, args.chain, args)
        eagle.save(args.output / "eagle")
    if "medusa" in args.heads:
        sizes = args.num_medusa_heads, args.medusa_layers
        medusa = MedusaHeads(target.config, weight, sizes, ids).to(device)
        train(medusa, target, rows, args.num_medusa_heads, args)
        medusa.save(args.output / "medusa", str(args.model))


if __name__ == "__main__":
    main()
