"""Placement of groups on hosts and devices: assignments, refusals, and the printed table."""

from __future__ import annotations

import pytest

from trimaran.launcher.placement.placement import (
    Host,
    PlacementError,
    PlacementRequest,
    picture,
    place,
)

FOUR_GPUS = Host(name="a", num_gpus=4)


def gpus(name, num_ranks, *devices, num_nodes=1):
    return PlacementRequest(
        name=name, num_ranks=num_ranks, devices=devices, needs_gpus=True, num_nodes=num_nodes
    )


def where(placements):
    return [(placed.group, placed.rank, placed.host, placed.device) for placed in placements]


def refusal(requests, hosts, taken=()):
    with pytest.raises(PlacementError) as caught:
        place(requests, hosts, taken)
    return str(caught.value)


def test_named_gpus_are_assigned_in_rank_order_and_other_groups_get_free_gpus():
    placements = place([gpus("any", 2), gpus("named", 2, "2", "0")], [FOUR_GPUS])
    assert where(placements) == [
        ("any", 0, "a", "1"), ("any", 1, "a", "3"),
        ("named", 0, "a", "2"), ("named", 1, "a", "0"),
    ]  # fmt: skip


def test_large_groups_are_placed_before_small_groups():
    hosts = [Host(name="a", num_gpus=2), Host(name="b", num_gpus=1)]
    placements = place([gpus("small", 1), gpus("large", 2)], hosts)
    assert where(placements)[0] == ("small", 0, "b", "0")


def test_the_same_gpu_number_on_another_host_is_another_gpu():
    hosts = [Host(name="a", num_gpus=2, num_slots=2), Host(name="b", num_gpus=2, num_slots=2)]
    placements = place([gpus("x", 2, "0", "1"), gpus("y", 2, "0", "1")], hosts)
    assert {(placed.group, placed.host) for placed in placements} == {("x", "a"), ("y", "b")}


def test_a_group_over_two_hosts_has_half_of_its_ranks_on_each_host():
    hosts = [Host(name=name, num_gpus=4, num_slots=4) for name in "ab"]
    placements = place([gpus("x", 4, "0", "1", "0", "1", num_nodes=2)], hosts)
    assert where(placements) == [
        ("x", 0, "a", "0"), ("x", 1, "a", "1"), ("x", 2, "b", "0"), ("x", 3, "b", "1"),
    ]  # fmt: skip


def test_ranks_may_fill_the_hosts_in_order():
    hosts = [Host(name="a", num_slots=3), Host(name="b", num_slots=2)]
    placements = place([PlacementRequest(name="x", num_ranks=4, num_nodes=0)], hosts)
    assert [placed.host for placed in placements] == ["a", "a", "a", "b"]


def test_tensor_parallel_groups_stay_on_one_host_if_slots_suffice():
    def hosts_of(wanted, *slots):
        hosts = [Host(name=name, num_slots=n) for name, n in zip("abc", slots, strict=False)]
        return "".join(placed.host for placed in place([wanted], hosts))

    pairs = PlacementRequest(name="m", num_ranks=4, num_nodes=0, num_together=2)

    assert hosts_of(pairs, 3, 3) == "aabb"
    assert hosts_of(pairs, 1, 2, 3) == "bbcc"
    # Two hosts are better than a refusal.
    assert hosts_of(pairs, 1, 3) == "abbb"


def test_a_gpu_requested_twice_is_refused_with_both_groups_and_a_placement_map():
    text = refusal([gpus("llama", 2, "0", "1"), gpus("gpt", 2, "1", "2")], [FOUR_GPUS])
    assert "group 'gpt' asks for GPU 1, which group 'llama' has." in text
    assert "gpu_device_ids in config.pbtxt" in text
    assert "GPU 1    llama rank 1\n" in text
    assert text.endswith("not placed: gpt (2 rank(s), GPUs 1,2)")


def test_overlapping_devices_are_refused_on_the_cpu_too():
    wanted = PlacementRequest(name="x", num_ranks=1, devices=("0",))
    other = PlacementRequest(name="y", num_ranks=1, devices=("0",))
    assert "asks for GPU 0" in refusal([wanted, other], [Host(name="a")])


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        (gpus("x", 1, "7"), "gpu_device_ids names GPU 7 but 4 are visible here"),
        (gpus("x", 2, "1", "1"), "names GPU 1 twice"),
        (gpus("x", 5), "needs 5 GPU(s) on one host but at most 4 are free"),
        (gpus("x", 4, num_nodes=2), "asks for num_nodes 2, but there is/are 1 host(s)"),
        (gpus("x", 3, num_nodes=2), "3 ranks, which num_nodes 2 does not divide"),
    ],
)
def test_a_placement_that_does_not_fit_names_the_missing_slots(wanted, complaint):
    assert complaint in refusal([wanted], [FOUR_GPUS])


def test_slots_limit_ranks_without_gpus():
    hosts = [Host(name="a", num_slots=1), Host(name="b", num_slots=1)]
    text = refusal([PlacementRequest(name="x", num_ranks=2)], hosts)
    assert "needs 2 slot(s) on one host but at most 1 are free" in text
    assert "num_nodes" in text


def test_a_host_whose_slots_are_taken_gets_no_rank():
    hosts = [Host(name="a", num_slots=1), Host(name="b", num_slots=1)]
    taken = place([PlacementRequest(name="x", num_ranks=1)], hosts)
    assert where(taken) == [("x", 0, "a", "")]

    beside = place([PlacementRequest(name="y", num_ranks=1)], hosts, taken)

    assert where(beside) == [("y", 0, "b", "")]
    text = refusal([PlacementRequest(name="z", num_ranks=1)], hosts, [*taken, *beside])
    assert "needs 1 slot(s) on one host but at most 0 are free" in text


def test_slots_of_running_groups_stay_taken():
    running = place([gpus("old", 3)], [FOUR_GPUS])
    assert where(place([gpus("new", 1)], [FOUR_GPUS], running)) == [("new", 0, "a", "3")]
    assert "at most 1 are free" in refusal([gpus("new", 2)], [FOUR_GPUS], running)


def test_the_placement_map_shows_every_gpu_and_every_group():
    host = Host(name="a", num_gpus=3)
    placements = place([gpus("x", 2), PlacementRequest(name="cpu", num_ranks=2)], [host])
    assert picture([host, Host(name="b")], placements).splitlines() == [
        "Placement:",
        "  a (3 GPU(s))",
        "    GPU 0    x rank 0",
        "    GPU 1    x rank 1",
        "    GPU 2    free",
        "    CPU      cpu rank 0 to 1",
        "  b",
        "    no ranks",
    ]


def test_the_placement_map_shows_ranks_on_hosts_without_gpus():
    hosts = [Host(name="a", num_slots=1), Host(name="b", num_slots=1)]
    lines = picture(hosts, place([PlacementRequest(name="x", num_ranks=1)], hosts)).splitlines()
    assert [line.strip() for line in lines] == [
        "Placement:", "a (1 slot(s))", "CPU      x rank 0", "b (1 slot(s))", "no ranks",
    ]  # fmt: skip
