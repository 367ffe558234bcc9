"""Number and delay of restarts."""

from trimaran.launcher.config import RestartPolicy
from trimaran.launcher.supervisor.group_table import RestartBudget


def test_each_pause_is_twice_as_long_up_to_the_longest():
    policy = RestartPolicy(max_restarts=6, first_delay_s=1.0, max_delay_s=10.0)
    budget = RestartBudget(policy)

    assert [budget.take(0.0) for _ in range(7)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, None]
    assert budget.num_restarts == 6


def test_restarts_before_the_window_count_no_more():
    policy = RestartPolicy(max_restarts=2, window_s=10.0, first_delay_s=1.0)
    budget = RestartBudget(policy)

    assert [budget.take(now) for now in (0.0, 5.0, 9.0, 12.0)] == [1.0, 2.0, None, 2.0]


def test_thousands_of_restarts_leave_the_pause_what_it_is():
    policy = RestartPolicy(max_restarts=5000, window_s=1e9, max_delay_s=30.0)
    budget = RestartBudget(policy)

    assert [budget.take(float(now)) for now in range(5000)][-1] == 30.0
