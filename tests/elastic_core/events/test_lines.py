from elastic_core.events.lines import parse_lines


def test_a_line_that_was_cut_off_is_left_out() -> None:
    text = ['{"g":1,"a":1,"c":7}\n', '{"g":1,"a":1,"e":0,"s":8,"ids":[1,2']
    assert list(parse_lines(text)) == [{"g": 1, "a": 1, "c": 7}]


def test_a_whole_line_right_behind_a_torn_one_is_found() -> None:
    torn = '{"step":5,"metrics":{"loss":0.'
    whole = '{"step":6,"metrics":{"loss":0.25}}'
    assert list(parse_lines([torn + whole])) == [{"step": 6, "metrics": {"loss": 0.25}}]


def test_what_is_no_object_is_left_out() -> None:
    assert list(parse_lines(["", "\n", "7", "[1]", "null", "\x00\x00", '{"c":1}'])) == [{"c": 1}]
