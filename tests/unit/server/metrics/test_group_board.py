"""The board of groups behind the operator's page."""

from trimaran.server.metrics.group_board import MAX_FAULTS, GroupBoard


def test_a_state_report_keeps_earlier_fields_of_the_group():
    board = GroupBoard()
    board.update("llama", {"model": "llama", "state": "up", "ranks": [{"rank": 0, "pid": 7}]})
    board.update("llama", {"state": "down"})
    (group,) = board.groups()
    assert group["state"] == "down"
    assert group["ranks"] == [{"rank": 0, "pid": 7}]
    assert group["group"] == group["model"] == "llama"


def test_every_fault_is_listed_once_and_the_newest_first():
    board = GroupBoard()
    board.update("a", {"state": "down", "text": "rank 0 died", "fault_time": 5.0})
    board.update("a", {"state": "starting", "fault_time": 5.0})
    board.update("a", {"state": "down", "text": "rank 1 died", "fault_time": 9.0})
    assert [fault["text"] for fault in board.faults()] == ["rank 1 died", "rank 0 died"]


def test_the_list_of_faults_is_bounded():
    board = GroupBoard()
    for moment in range(1, 1000):
        board.update("a", {"state": "down", "text": "died", "fault_time": float(moment)})
    assert len(board.faults()) == MAX_FAULTS
    assert board.faults()[0]["time"] == 999.0


def test_groups_of_models_come_before_other_processes():
    board = GroupBoard()
    board.update("frontend", {"state": "up"})
    board.update("zebra", {"model": "zebra"})
    assert [group["group"] for group in board.groups()] == ["zebra", "frontend"]
    board.remove("zebra")
    assert [group["group"] for group in board.groups()] == ["frontend"]
