"""Of the gate's coverage, and of the threads that passes compute with."""

from __future__ import annotations

from faults.fault import Fault, Property

COVERAGE, THREADS = "test_gate_coverage.py::", "test_pass_threads.py::"

PROPERTIES = (
    Property(
        "A case of the gate without a result of its own fails with its name.",
        f"{COVERAGE}test_a_case_without_a_result_of_its_own_fails_with_its_name",
        (
            Fault("a missing result passes", "cli/gate.py",
                  "not_run(baselines, cases, args.quick) + failures(cases, results)",
                  "not_run(baselines, cases, args.quick)"),
            Fault("a case that failed passes", "gate/coverage.py",
                  "if isinstance(result, str):", "if False:"),
            Fault("the record of another case passes", "gate/coverage.py",
                  "elif _is_of_another(result, baseline, cases):", "elif False:"),
        ),
    ),
    Property(
        "A case of the file that is not run fails by name.",
        f"{COVERAGE}test_a_baseline_that_is_not_among_the_cases_fails",
        (
            Fault("cases that are not run pass", "gate/coverage.py",
                  "names = Counter(map(describe, baselines)) - Counter(map(describe, cases))",
                  "names = set()"),
            Fault("one of two equal cases is enough", "gate/coverage.py",
                  "names = Counter(map(describe, baselines)) - Counter(map(describe, cases))",
                  "names = set(map(describe, baselines)) - set(map(describe, cases))"),
        ),
    ),
    Property(
        "--quick has a case of every drafter and policy.",
        f"{COVERAGE}test_quick_must_have_a_case_of_every_drafter_and_policy_of_the_file",
        (
            Fault("methods without a case pass", "gate/coverage.py",
                  "{method_of(b) for b in baselines} - {method_of(case) for case in cases}",
                  "set()"),
        ),
    ),
    Property(
        "A worker gives a result of each of its cases.",
        f"{COVERAGE}test_a_worker_gives_a_result_of_each_case_that_ends_with_any_error",
        (
            Fault("an unexpected error ends the worker", "gate/measuring.py",
                  "except Exception as error:  # such as", "except KeyError as error:  # such as"),
        ),
    ),
    Property(
        "A rank that computed with other threads than its config says is named.",
        f"{THREADS}test_a_rank_with_other_threads_than_its_config_is_named",
        (
            Fault("threads are not compared", "hardware/threads.py",
                  "if not fewest == expected == most:", "if not fewest == most:"),
            Fault("only the fewest threads are compared", "hardware/threads.py",
                  "if not fewest == expected == most:", "if fewest != expected:"),
        ),
    ),
    Property(
        "Passes of a run have equal threads and ranks.",
        f"{THREADS}test_a_record_whose_passes_had_other_resources_is_refused",
        (
            Fault("a record may have unequal passes", "records/record.py",
                  "return unequal_threads(record.samples or {})", "return None"),
            Fault("only the first batch is compared", "records/consistency.py",
                  "for batch, threads in enumerate(samples.threads):",
                  "for batch, threads in enumerate(samples.threads[:1]):"),
        ),
    ),
    Property(
        "One process computes with the threads of all ranks of its host.",
        f"{THREADS}test_each_rank_has_its_own_and_one_process_those_of_its_host",
        (
            Fault("one process expected to have a rank's threads", "serving/batching.py",
                  "threads = config.parallel.threads_on(models.launch.local_ranks)",
                  "threads = config.parallel.threads_of(0)"),
        ),
    ),
    Property(
        "A run whose threads change while it decodes ends.",
        f"{THREADS}test_a_run_whose_decoding_changes_the_threads_ends",
        (
            Fault("threads measured before a pass alone", "run/run.py",
                  "        samples.end_batch(finished, started)\n        threads.note()\n",
                  "        samples.end_batch(finished, started)\n"),
        ),
    ),
)  # fmt: skip
