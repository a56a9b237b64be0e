from tests.field_reports import PAGE, marked_tests, page, reports


def test_every_report_is_held_by_a_test_and_every_marker_names_a_report() -> None:
    assert marked_tests().keys() == reports().keys()


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.field_reports --update"
