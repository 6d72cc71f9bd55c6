"""A part of Celery's own integration suite passes; ``make celery-suite`` runs all of it (docs/conformance.md)."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from tests import services
from tests.conformance.celery_suite import setting
from tests.conformance.exceptions import expected, surprises
from tests.conformance.sdists import installed_sdist

EXCEPTIONS = Path(setting.__file__).parent / "exceptions.toml"
#: Seconds for all of them. They take about 90 on a machine that has nothing else to do, a third of that at work.
ALL = 600
#: In every version of Celery that is supported. Each says something else about a result backend, and most are quick.
CHOSEN = [
    # one result: values, errors, retries, ignored results
    "test_simple_call",
    "test_basic_task",
    "test_fail_with_unpickleable_exception",
    "test_retry_with_unpickleable_exception",
    "test_ignore_result",
    "test_ready_with_exception",
    "test_link_error_using_signature",
    "test_result_set_error",
    # chains
    "test_complex_chain",
    "test_chain_on_error",
    "test_second_order_replace",
    "test_groupresult_serialization",
    "test_chain_with_errback_child_replaced",
    # groups
    "test_empty_group_result",
    "test_nested_group_group",
    "test_large_group",
    "test_group_lone",
    "test_errback_called_by_group_fail_multiple",
    "test_group_children_with_errbacks",
    # chords: their bodies, their errors, what they are nested in
    "test_empty_header_chord",
    "test_single_task_header",
    "test_chord_order",
    "test_parallel_chords",
    "test_chord_in_chords_with_chains",
    "test_add_chord_to_chord",
    "test_chain_of_chords_with_two_tasks",
    "test_chord_soft_timeout_recuperation",
    "test_error_propagates_to_chord_from_group",
    "test_immutable_errback_called_by_chord_from_group_fail_multiple",
    "test_mutable_errback_called_by_chord_from_group_fail_multiple_on_header_failure",
    "test_nested_group_chord_counting_mixed",
    "test_chord_header_task_replaced_with_chain",
    "test_chord_body_chain_child_replaced_with_chain_last",
    # stamps and priorities, which a chord hands on
    "test_stamping_workflow",
    "test_priority_chain",
]


@pytest.mark.conformance
@pytest.mark.slow
@pytest.mark.postgresql
@pytest.mark.timeout(ALL + 60)
def test_what_says_most_about_a_result_backend(request, postgresql_url, tmp_path):
    """With taskgate as broker and result backend; all of them have run, or are listed with a reason."""
    with services.skip_if_missing():
        results = setting.run(
            installed_sdist("celery", request.config.cache.mkdir("sdists")),
            f"taskgate+{postgresql_url}",
            tmp_path,
            arguments=["-k", " or ".join(CHOSEN), "t/integration/test_canvas.py", "t/integration/test_tasks.py"],
            limit=ALL,
            tell=print,
        )
    listed = expected(EXCEPTIONS, store="postgresql", version=version("celery"))
    outcomes = {name: result.outcome for name, result in results.items()}
    texts = "".join(f"\n== {name}\n{result.text}" for name, result in results.items() if result.outcome == "failed")
    assert surprises(outcomes, listed, whole=False) == [], texts
    ran = {name.rpartition("::")[2].partition("[")[0] for name in outcomes}
    assert set(CHOSEN) <= ran
