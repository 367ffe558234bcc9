"""Number and delay of restarts."""

from trimaran.launcher.config import RestartPolicy
from trimaran.launcher.supervisor.group_table import RestartBudget


def test_restart_delays_double_up_to_the_limit():
    policy = RestartPolicy(max_restarts=6, first_delay_s=1.0, max_delay_s=10.0)
    budget = RestartBudget(policy)

    assert [budget.take(0.0) for _ in range(7)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, None]


def test_restarts_before_the_window_do_not_count():
    policy = RestartPolicy(max_restarts=2, window_s=10.0, first_delay_s=1.0)
    budget = RestartBudget(policy)

    assert [budget.take(now) for now in (0.0, 5.0, 9.0, 12.0)] == [1.0, 2.0, None, 2.0]


def test_thousands_of_restarts_keep_the_delay_at_its_limit():
    policy = RestartPolicy(max_restarts=5000, window_s=1e9, max_delay_s=30.0)
    budget = RestartBudget(policy)

    assert [budget.take(float(now)) for now in range(5000)][-1] == 30.0


def test_a_death_possibly_caused_by_requests_costs_a_delay_and_no_restart_budget():
    budget = RestartBudget(RestartPolicy(max_restarts=1, first_delay_s=1.0))

    pauses = [budget.take(0.0, is_free=True) for _ in range(100)]

    assert pauses[:4] == [1.0, 2.0, 4.0, 5.0]
    assert set(pauses[4:]) == {5.0}
    assert budget.take(1e3, is_free=True) == 1.0
    assert [budget.take(1e3) for _ in range(2)] == [1.0, None]


def test_a_death_possibly_caused_by_requests_ends_a_server_without_restarts():
    assert RestartBudget(RestartPolicy(max_restarts=0)).take(0.0, is_free=True) is None
