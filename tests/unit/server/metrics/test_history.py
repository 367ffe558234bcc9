"""The last ten minutes of engines."""

from trimaran.server.metrics.history import History, Reading, svg_path

KEY = ("llama", "1")


def reading(tokens_per_s):
    return Reading(tokens_per_s, 1.0, 0.5, None)


def test_readings_older_than_ten_minutes_are_dropped():
    history = History()
    for number in range(250):
        history.add({KEY: reading(float(number))})
    values = history.of(KEY)
    assert history.max_readings == 100
    assert values["tokens_per_s"] == [float(number) for number in range(150, 250)]
    assert values["kv_used_fraction"] == [0.5] * 100
    assert values["first_token_p99_s"] == [None] * 100


def test_an_engine_has_no_values_while_the_engine_is_not_loaded():
    history = History()
    history.add({KEY: reading(1.0)})
    history.add({})
    history.add({KEY: reading(3.0)})
    assert history.of(KEY)["tokens_per_s"] == [1.0, None, 3.0]


def test_a_line_ends_at_the_last_step_and_is_broken_where_values_are_missing():
    path = svg_path([0.0, 10.0, None, 5.0], 100, 10.0, 30)
    assert path == "M96 30.0h0L97 0.0M99 15.0h0"


def test_values_above_the_top_are_drawn_at_the_top():
    assert svg_path([20.0], 100, 10.0, 30) == "M99 0.0h0"


def test_a_line_of_zeros_lies_at_the_bottom():
    assert svg_path([0.0, 0.0], 100, 0.0, 30) == "M98 30.0h0L99 30.0"
