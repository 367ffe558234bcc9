"""Trains the demo models: a small sweep; the best candidates by held-out loss are kept."""

from __future__ import annotations

import argparse
import copy
import csv
import json
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import (
    BOS_ID,
    MAX_LENGTH,
    encode_pieces,
    encode_training,
    save_tokenizer,
    split_text,
    train_tokenizer,
)
from network import Decoder
from recipes import RECIPES, Recipe
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

SEED = 1234
BALANCE_WEIGHT = 0.01
WARMUP_SHARE = 0.05
EMA_DECAY = 0.995


@dataclass(frozen=True)
class HeldOut:
    """Held-out text as windows; each of its tokens is scored once.

    The windows of a piece overlap by half, so that a scored token sees at least 512 earlier
    tokens, or all tokens from the start of its piece.
    """

    ids: np.ndarray
    is_scored: np.ndarray
    num_bytes: int

    @classmethod
    def from_pieces(cls, tokenizer: Tokenizer, pieces: list[str]) -> HeldOut:
        """Cut encoded pieces into windows of ``MAX_LENGTH`` targets."""
        windows, scored = [], []
        stride = MAX_LENGTH // 2
        for ids in encode_pieces(tokenizer, pieces):
            for start in range(0, max(len(ids) - 1 - stride, 1), stride):
                window = ids[start : start + MAX_LENGTH + 1]
                mask = np.zeros(MAX_LENGTH, dtype=bool)
                mask[0 if start == 0 else stride : len(window) - 1] = True
                windows.append(np.pad(window, (0, MAX_LENGTH + 1 - len(window))))
                scored.append(mask)
        num_bytes = sum(len(piece.encode()) for piece in pieces)
        return cls(np.stack(windows), np.stack(scored), num_bytes)

    @torch.no_grad()
    def bits_per_byte(self, model: nn.Module, device: torch.device) -> float:
        """Score the whole text with ``model``."""
        nats = 0.0
        for first in range(0, len(self.ids), 32):
            ids = torch.from_numpy(self.ids[first : first + 32]).long().to(device)
            mask = torch.from_numpy(self.is_scored[first : first + 32]).to(device)
            logits, _ = model(ids[:, :-1])
            losses = F.cross_entropy(
                logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
            )
            nats += float(losses[mask.flatten()].double().sum())
        return nats / self.num_bytes / math.log(2)


@dataclass(frozen=True)
class Corpus:
    """The data of one candidate, for training and evaluation."""

    stream: np.ndarray
    bytes_per_token: float
    choose: HeldOut


@dataclass(frozen=True)
class Result:
    """A trained candidate: its best held-out figure and the curve that led there."""

    recipe: Recipe
    best: float
    best_passes: float
    curve: list[tuple[int, float, float, float]]
    """Step, passes, training and held-out bits per byte."""

    weights: Path
    seconds: float


def make_optimizers(model: Decoder, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Matrices decay, vectors do not; Muon takes only the layers' matrices."""
    inner = [p for n, p in model.named_parameters() if p.dim() > 1 and n.startswith("layers")]
    embedding = [model.embed_tokens.weight]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizers: list[torch.optim.Optimizer] = []
    if recipe.optimizer == "muon":
        optimizers.append(
            torch.optim.Muon(
                inner,
                lr=recipe.learning_rate,
                weight_decay=recipe.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
        inner = []
    groups = [
        {"params": inner + embedding, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizers.append(torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98)))
    return optimizers


def learning_rate(recipe: Recipe, step: int, num_steps: int) -> float:
    """Linear warm-up, then cosine decay to zero."""
    warmup = max(1, int(WARMUP_SHARE * num_steps))
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


class Batches:
    """Rows of one pass after another; each pass cuts the stream at another offset.

    Half of the rows start with ``<s>``, so that prompts work with and without ``<s>``.
    """

    def __init__(self, stream: np.ndarray, rows: int, device: torch.device) -> None:
        self._stream = torch.from_numpy(stream).long().to(device)
        self._rows = rows
        self._device = device
        self._generator = torch.Generator().manual_seed(SEED)
        self._starts = torch.empty(0, dtype=torch.long)
        self.num_steps_a_pass = (len(stream) - 2 * MAX_LENGTH) // MAX_LENGTH // rows

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one step."""
        if len(self._starts) < self._rows:
            offset = int(torch.randint(MAX_LENGTH, (1,), generator=self._generator))
            starts = torch.arange(offset, len(self._stream) - MAX_LENGTH - 1, MAX_LENGTH)
            self._starts = starts[torch.randperm(len(starts), generator=self._generator)]
        starts, self._starts = self._starts[: self._rows], self._starts[self._rows :]
        index = starts[:, None] + torch.arange(MAX_LENGTH + 1)
        rows = self._stream[index.to(self._device)]
        inputs = rows[:, :-1].clone()
        is_start = torch.rand(self._rows, generator=self._generator) < 0.5
        inputs[is_start.to(self._device), 0] = BOS_ID
        return inputs, rows[:, 1:]


class Judge:
    """Averages a candidate's weights, evaluates the average, keeps the best one on disk."""

    def __init__(self, recipe: Recipe, corpus: Corpus, model: nn.Module, work: Path) -> None:
        self.best, self.best_passes = math.inf, 0.0
        self.curve: list[tuple[int, float, float, float]] = []
        self.weights = work / f"{recipe.name}.pt"
        self._name = recipe.name
        self._corpus = corpus
        self._average = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update_average(self, model: nn.Module, step: int) -> None:
        """Exponential moving average that starts as the plain weights."""
        decay = min(EMA_DECAY, (1 + step) / (10 + step))
        torch._foreach_lerp_(
            list(self._average.parameters()), list(model.parameters()), 1 - decay
        )

    def evaluate(self, step: int, passes: float, train_nats: float) -> None:
        """Score the average on held-out text and keep the best average."""
        device = next(self._average.parameters()).device
        with torch.autocast(device.type, torch.bfloat16):
            held_out = self._corpus.choose.bits_per_byte(self._average, device)
        train = train_nats / math.log(2) / self._corpus.bytes_per_token
        self.curve.append((step, passes, train, held_out))
        figures = f"train {train:.4f} held-out {held_out:.4f}"
        print(f"{self._name} pass {passes:.2f} {figures}", flush=True)
        if held_out < self.best:
            self.best, self.best_passes = held_out, passes
            torch.save(self._average.state_dict(), self.weights)


def train_candidate(
    recipe: Recipe, corpus: Corpus, work: Path, limits: argparse.Namespace
) -> Result:
    """Train one candidate and keep the averaged weights of its best evaluation."""
    began = time.monotonic()
    torch.manual_seed(SEED)
    torch.set_num_threads(limits.threads)
    torch.set_float32_matmul_precision("high")
    device = torch.device(limits.device)
    model = Decoder(recipe.shape, recipe.dropout).to(device)
    judge = Judge(recipe, corpus, model, work)
    optimizers = make_optimizers(model, recipe)
    batches = Batches(corpus.stream, recipe.rows, device)
    num_steps = min(recipe.passes * batches.num_steps_a_pass, limits.max_steps)
    period = min(batches.num_steps_a_pass, num_steps)
    forward = torch.compile(model) if device.type == "cuda" else model
    losses = []
    for step in range(1, num_steps + 1):
        rate = learning_rate(recipe, step - 1, num_steps)
        losses.append(train_step(forward, batches, optimizers, rate))
        judge.update_average(model, step - 1)
        if step % period == 0 or step == num_steps:
            passes = step / batches.num_steps_a_pass
            judge.evaluate(step, passes, float(torch.stack(losses).mean()))
            losses.clear()
            if time.monotonic() > limits.deadline:
                print(f"{recipe.name}: out of time", flush=True)
                break
    seconds = time.monotonic() - began
    return Result(recipe, judge.best, judge.best_passes, judge.curve, judge.weights, seconds)


def train_step(
    forward: nn.Module, batches: Batches, optimizers: list[torch.optim.Optimizer], rate: float
) -> Tensor:
    """One step; the mean loss a token in nats, still on the device."""
    inputs, targets = batches.next()
    with torch.autocast(inputs.device.type, torch.bfloat16):
        logits, balance = forward(inputs)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    (loss + BALANCE_WEIGHT * balance).backward()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def export(
    result: Result, report: HeldOut, tokenizer: Tokenizer, folder: Path
) -> dict[str, object]:
    """Write the Hugging Face folder and score the weights as they are stored."""
    folder.mkdir(parents=True, exist_ok=True)
    model = Decoder(result.recipe.shape, 0.0).eval()
    model.load_state_dict(torch.load(result.weights, map_location="cpu", weights_only=True))
    tensors = {name: tensor.clone() for name, tensor in model.to_huggingface().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(result.recipe.shape.to_huggingface(), indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    save_tokenizer(tokenizer, folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "model": result.recipe.model,
        "recipe": result.recipe.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "passes": round(result.best_passes, 2),
        "choose_bits_per_byte": round(result.best, 4),
        "report_bits_per_byte": round(report.bits_per_byte(model.to(device), device), 4),
        "max_logit_difference": check_against_transformers(model.cpu(), folder),
    }


@torch.no_grad()
def check_against_transformers(model: Decoder, folder: Path) -> float:
    """Load the folder as a user would and compare float32 logits on random ids."""
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(3, 4096, (1, 64), generator=torch.Generator().manual_seed(SEED))
    difference = float((model(ids)[0] - other(ids).logits).abs().max())
    if difference > 1e-2:
        raise RuntimeError(f"{folder}: transformers' logits differ by {difference}")
    return difference


def run_sweep(
    recipes: list[Recipe], corpus: Corpus, work: Path, args: argparse.Namespace
) -> list[Result]:
    """Train all candidates, ``--jobs`` of them at a time on the one device."""
    context = multiprocessing.get_context("spawn")
    results = []
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        pending = [
            pool.submit(train_candidate, recipe, corpus, work, args) for recipe in recipes
        ]
        for future in as_completed(pending):
            result = future.result()
            figures = f"{result.best:.4f} after {result.best_passes:.2f} passes"
            print(f"== {result.recipe.name}: {figures}, {result.seconds:.0f} s", flush=True)
            results.append(result)
    return results


def write_tables(results: list[Result], chosen: list[Result], output: Path) -> None:
    """The learning curves of the chosen and one line for every candidate."""
    with (output / "learning_curves.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(
            ["model", "step", "passes", "train_bits_per_byte", "held_out_bits_per_byte"]
        )
        for result in chosen:
            for step, passes, train, held_out in result.curve:
                table.writerow(
                    [
                        result.recipe.model,
                        step,
                        round(passes, 2),
                        round(train, 4),
                        round(held_out, 4),
                    ]
                )
    with (output / "sweep.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["candidate", "best_held_out_bits_per_byte", "at_passes", "seconds"])
        for result in sorted(results, key=lambda r: (r.recipe.model, r.best)):
            table.writerow(
                [
                    result.recipe.name,
                    round(result.best, 4),
                    round(result.best_passes, 2),
                    round(result.seconds),
                ]
            )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--text", type=Path, required=True, help="a plain UTF-8 text, a paragraph a line"
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--models", default="base,draft,moe", help="which of the three to train"
    )
    parser.add_argument("--only", default="", help="train candidates whose name holds this")
    parser.add_argument("--jobs", type=int, default=7, help="candidates trained at a time")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a candidate")
    parser.add_argument("--max-steps", type=int, default=10**9, help="end each candidate early")
    parser.add_argument("--max-seconds", type=float, default=1e9, help="for the whole sweep")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Prepare the text, run the sweep, write the best of each model."""
    args = parse_arguments()
    args.deadline = time.monotonic() + args.max_seconds
    split = split_text(args.text.read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(split.train)
    stream = encode_training(tokenizer, split.train)
    num_bytes = sum(len(piece.encode()) for piece in split.train)
    corpus = Corpus(
        stream, num_bytes / len(stream), HeldOut.from_pieces(tokenizer, split.choose)
    )
    report = HeldOut.from_pieces(tokenizer, split.report)
    print(f"{len(stream)} training tokens, {corpus.bytes_per_token:.3f} bytes each", flush=True)
    print(
        f"{corpus.choose.num_bytes} bytes held out to choose by, {report.num_bytes} to report"
    )
    models = args.models.split(",")
    recipes = [r for r in RECIPES if r.model in models and args.only in r.name]
    work = args.output / "work"
    work.mkdir(parents=True, exist_ok=True)
    results = run_sweep(recipes, corpus, work, args)
    chosen = []
    figures = []
    for model in models:
        of_model = [result for result in results if result.recipe.model == model]
        if of_model:
            chosen.append(min(of_model, key=lambda result: result.best))
            figures.append(export(chosen[-1], report, tokenizer, args.output / model))
            print(json.dumps(figures[-1]), flush=True)
    write_tables(results, chosen, args.output)
    (args.output / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
