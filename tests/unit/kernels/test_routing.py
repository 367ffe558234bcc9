"""The choice of experts: torch against the rules written out, and Triton against torch."""

from __future__ import annotations

import struct

import pytest
import torch

from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.kernels.routing import ExpertCounter, ExpertRouting, ExpertSlotTable
from trimaran.kernels.torch_ops import TorchOps
from trimaran.kernels.triton import routing as triton_routing

ROUTINGS = {
    "mixtral": ExpertRouting(num_chosen=2),
    "not normalised": ExpertRouting(num_chosen=4, is_normalised=False),
    "best groups": ExpertRouting(
        num_chosen=3, is_normalised=False, scaling=16.0, num_groups=5, num_chosen_groups=2
    ),
    "sigmoid": ExpertRouting(num_chosen=4, scoring="sigmoid", scaling=1.5),
    "two best of a group": ExpertRouting(
        num_chosen=5, scoring="sigmoid", scaling=2.5, num_groups=4, num_chosen_groups=3,
        num_ranked=2,
    ),
}  # fmt: skip

CHOOSERS = {
    "torch": TorchOps().choose_experts,
    "cpu": CpuOps(load_library(), torch.bfloat16, 1).choose_experts,
    "triton": triton_routing.choose_experts,
}
every_choice = pytest.mark.parametrize("choose", CHOOSERS.values(), ids=CHOOSERS)


def drawn(tokens: int, experts: int) -> torch.Tensor:
    """The router's numbers."""
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts))


def expected(logits: list[float], routing: ExpertRouting, bias: list[float]):
    """One token's weight by expert, by the rules, number by number."""
    values = torch.tensor(logits, dtype=torch.float64)
    is_softmax = routing.scoring == "softmax"
    scores = (values.softmax(0) if is_softmax else values.sigmoid()).tolist()
    ranked = [score + each for score, each in zip(scores, bias, strict=True)]
    size = len(scores) // routing.num_groups
    groups = [range(first, first + size) for first in range(0, len(scores), size)]
    groups.sort(key=lambda group: -sum(sorted(ranked[x] for x in group)[-routing.num_ranked :]))
    left = [expert for group in groups[: routing.num_chosen_groups] for expert in group]
    chosen = sorted(left, key=lambda expert: -ranked[expert])[: routing.num_chosen]
    total = sum(scores[expert] for expert in chosen) if routing.is_normalised else 1.0
    return {expert: scores[expert] / total * routing.scaling for expert in chosen}


def table_of(experts: int, parts: int) -> ExpertSlotTable:
    """Slots in no order; of three neighbours one is at all parts, the next at a single one."""
    generator = torch.Generator().manual_seed(parts)
    slots = torch.randperm(experts * parts, generator=generator).view(experts, parts)
    copies = torch.tensor([(parts, 1, max(parts - 1, 1))[x % 3] for x in range(experts)])
    return ExpertSlotTable(slots.int(), copies.int())


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_are_chosen_by_the_rules(routing, has_bias):
    logits = drawn(9, 20)
    bias = torch.linspace(0.2, -0.2, 20) if has_bias else None

    weights, ids = TorchOps().choose_experts(logits, routing, bias)

    assert ids.dtype == torch.int32
    added = [0.0] * 20 if bias is None else bias.tolist()
    for row, values in enumerate(logits.tolist()):
        wanted = expected(values, routing, added)
        assert ids[row].tolist() == list(wanted)
        torch.testing.assert_close(weights[row], torch.tensor(list(wanted.values())))


@pytest.mark.matrix(keep=12)
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 20), (9, 60), (6, 160)])
def test_tritons_choice_is_that_of_torch(routing, has_bias, tokens, experts):
    logits = drawn(tokens, experts)
    bias = torch.linspace(-0.2, 0.2, experts) if has_bias else None

    weights, ids = triton_routing.choose_experts(logits, routing, bias)

    of_torch = TorchOps().choose_experts(logits, routing, bias)
    assert ids.equal(of_torch[1])
    torch.testing.assert_close(weights, of_torch[0])


@pytest.mark.parametrize("ops", [TorchOps(), CpuOps(load_library(), torch.bfloat16, 1)])
def test_router_logits_are_not_rounded(ops):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 96, generator=generator).bfloat16()
    weight = torch.randn(12, 96, generator=generator).bfloat16()

    logits = ops.router_logits(x, weight)

    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T)


@every_choice
def test_expert_choices_are_counted_without_those_of_padding(choose):
    logits = drawn(11, 12)
    routing = ROUTINGS["mixtral"]
    counts = torch.arange(12)

    _, ids = choose(logits, routing, None, ExpertCounter(counts))
    choose(logits, routing, None, ExpertCounter(counts, torch.tensor([6], dtype=torch.int32)))

    once, twice = ids[6:].flatten(), ids[:6].flatten()
    expected = twice.bincount(minlength=12) * 2 + once.bincount(minlength=12)
    assert counts.tolist() == (torch.arange(12) + expected).tolist()


@pytest.mark.matrix(keep=48)
@every_choice
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 20), (9, 60), (6, 160)])
def test_choices_of_an_expert_rotate_through_its_copies_from_a_drawn_start(
    choose, routing, parts, tokens, experts
):
    logits, table = drawn(tokens, experts), table_of(experts, parts)
    weights, ids = TorchOps().choose_experts(logits, routing)

    weights_too, slots = choose(logits, routing, None, None, table)

    torch.testing.assert_close(weights_too, weights)
    assert slots.dtype == torch.int32
    for row, (first, *_) in enumerate(logits.tolist()):
        (bits,) = struct.unpack("<I", struct.pack("<f", first))
        for choice, expert in enumerate(ids[row].tolist()):
            copy = ((bits & 0x7FFFFFFF) + choice) % int(table.num_copies[expert])
            assert slots[row, choice] == table.slots[expert, copy]


@every_choice
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_the_first_choices_of_a_token_go_to_different_parts_when_each_part_holds_all_experts(
    choose, parts
):
    experts = 20
    slots = torch.arange(parts) * experts + torch.arange(experts).unsqueeze(1)
    table = ExpertSlotTable(slots.int(), torch.full((experts,), parts, dtype=torch.int32))

    _, ids = choose(drawn(40, experts), ROUTINGS["two best of a group"], None, None, table)

    at_TC = ids // experts
    assert all(len(set(row)) == parts for row in at_TC[:, :parts].tolist())
    # Tokens do not all begin at the same part.
    assert len(set(at_TC[:, 0].tolist())) == parts


@every_choice
def test_routing_of_a_token_does_not_depend_on_other_tokens(choose):
    logits, table = drawn(9, 60), table_of(60, 4)
    routing = ROUTINGS["sigmoid"]

    _, together = choose(logits, routing, None, None, table)

    for row in range(9):
        assert choose(logits[row : row + 1], routing, None, None, table)[1].equal(
            together[row : row + 1]
        )


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("experts", [20, 60])
def test_routing_weights_on_the_cpu_do_not_depend_on_other_tokens(routing, experts):
    logits, choose = drawn(50, experts), CHOOSERS["cpu"]

    together, _ = choose(logits, routing)

    for row in range(50):
        assert choose(logits[row : row + 1], routing)[0].equal(together[row : row + 1])


@every_choice
def test_loads_are_counted_by_expert_and_not_by_slot(choose):
    logits, table = drawn(11, 20), table_of(20, 4)
    routing, counts = ROUTINGS["mixtral"], torch.zeros(20, dtype=torch.int64)
    _, ids = TorchOps().choose_experts(logits, routing)

    counter = ExpertCounter(counts, torch.tensor([6], dtype=torch.int32))
    _, slots = choose(logits, routing, None, counter, table)

    assert counts.equal(ids[:6].flatten().bincount(minlength=20))
    # Those that pad the step are somewhere, too.
    assert slots.equal(choose(logits, routing, None, None, table)[1])


@every_choice
def test_the_largest_drawn_start_wraps_around_the_copies(choose):
    logits, table, routing = drawn(5, 20), table_of(20, 3), ROUTINGS["sigmoid"]
    # Bits of a NaN; one more would be negative.
    logits[:, 0] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    _, ids = choose(logits, routing)

    _, slots = choose(logits, routing, None, None, table)

    copies = (0x7FFFFFFF + torch.arange(routing.num_chosen)) % table.num_copies[ids.long()]
    assert slots.equal(table.slots[ids.long(), copies])
