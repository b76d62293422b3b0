"""Of the gate's coverage, and of the threads that passes compute with."""

from __future__ import annotations

from faults.fault import Fault, Property

COVERAGE, THREADS = "test_gate_coverage.py::", "test_pass_threads.py::"

PROPERTIES = (
    Property(
        "A case of the gate without a result of its own fails with its name.",
        f"{COVERAGE}test_a_case_without_a_result_of_its_own_fails_with_its_name",
        (
            Fault("a case without a record passes", "cli/gate.py",
                  "if isinstance(result, str)", "if False"),
        ),
    ),
    Property(
        "--quick has a case of every drafter and policy.",
        f"{COVERAGE}test_quick_has_a_case_of_every_drafter_and_policy_of_the_file",
        (
            Fault("methods without a case pass", "gate/cases.py",
                  "for of_method in methods.values()]",
                  "for of_method in [*methods.values()][1:]]"),
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
            Fault("only the first batch is compared", "records/samples.py",
                  "for batch, threads in enumerate(samples.threads):",
                  "for batch, threads in enumerate(samples.threads[:1]):"),
        ),
    ),
    Property(
        "One process computes with the threads of all ranks of its host.",
        f"{THREADS}test_each_rank_has_its_own_and_one_process_those_of_its_host",
        (
            Fault("one process expected to have a rank's threads", "serving/batching.py",
                  "threads = min(own * len(models.launch.local_ranks), "
                  "max(own, models.machine.num_cpus))",
                  "threads = own"),
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
