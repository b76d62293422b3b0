"""Of traces of sessions: their waits, their scale, their texts, and what a cache could have."""

from __future__ import annotations

from faults.fault import Fault, Property

TESTS = "test_traces.py::"
REPLAYS = "test_trace_replay.py::"
CHATS = "test_chat_traces.py::"
SESSIONS = "workload/traces/sessions.py"
WEKA = "workload/traces/weka.py"
TEXTS = "workload/traces/block_texts.py"
CHAT_TEXTS = "workload/traces/chat_texts.py"
AIPERF = "workload/traces/aiperf.py"
MLPERF = "workload/traces/mlperf.py"
SEEN = "workload/traces/seen_texts.py"
ARRIVALS = "engine/arrivals.py"
COMPUTING = "records/computing.py"

PROPERTIES = (
    Property(
        "A cache without limits has the longest beginning of blocks that have all come before.",
        f"{TESTS}test_known_tokens_are_those_of_the_definition",
        (
            Fault(
                "the blocks of a request count for itself",
                SESSIONS,
                "        ids = seen[session.namespace]\n",
                "        ids = seen[session.namespace]\n        ids.update(prompt.hash_ids)\n",
            ),
            Fault(
                "sessions know each other's blocks",
                SESSIONS,
                "ids = seen[session.namespace]",
                'ids = seen[""]',
            ),
        ),
    ),
    Property(
        "A request knows what came before it in time.",
        f"{TESTS}test_a_request_knows_what_came_before_it_in_time",
        (
            Fault(
                "requests come in the order of the file",
                SESSIONS,
                "(session.begin_s + request.start_s, number, place)",
                "(0.0, number, place)",
            ),
        ),
    ),
    Property(
        "An agent waits for the sub-agents that had ended, and for no other.",
        f"{TESTS}test_an_agent_waits_for_its_sub_agents",
        (
            Fault(
                "an agent waits for no sub-agent",
                WEKA,
                "*(request for _, request in ended)]",
                "]",
            ),
            Fault(
                "an agent waits for every sub-agent",
                WEKA,
                "if agent[0] <= call.t]",
                "if True]",
            ),
        ),
    ),
    Property(
        "Equal blocks are equal text, and others differ.",
        f"{TESTS}test_equal_blocks_are_equal_text",
        (
            Fault(
                "a block is new text each time",
                TEXTS,
                "if hash_id not in pieces:",
                "if True:",
            ),
        ),
    ),
    Property(
        "The tokens of a trace's chats are those of transformers' templates.",
        f"{CHATS}test_tokens_are_those_of_transformers",
        (
            Fault(
                "a template knows no tools",
                "workload/chat_template.py",
                '"tools": self.tools,',
                '"tools": None,',
            ),
            Fault(
                "what begins an answer is a part of it",
                CHAT_TEXTS,
                "return len(whole_ids) - num_in_common(ids, whole_ids)",
                "return len(whole_ids) - num_in_common(ids, whole_ids) + 1",
            ),
        ),
    ),
    Property(
        "A prompt of a trace's chat has what was recorded before it, and no more.",
        f"{CHATS}test_a_row_of_a_user_or_a_tool_is_a_request",
        (
            Fault(
                "it has the recorded answer too",
                MLPERF,
                "(*begin, *self.messages[:count]),",
                "(*begin, *self.messages[: count + 1]),",
            ),
            Fault(
                "each request may be as long as the first",
                MLPERF,
                "row.most_new or first.most_new,",
                "first.most_new or row.most_new,",
            ),
        ),
    ),
    Property(
        "Lines of AIPerf's with one session_id follow each other, wherever they stand.",
        f"{CHATS}test_lines_of_aiperf_are_sessions_of_their_own",
        (
            Fault(
                "a delay is in seconds",
                AIPERF,
                "(row.delay or 0.0) / 1e3,",
                "(row.delay or 0.0),",
            ),
            Fault(
                "each line is a session of its own",
                AIPERF,
                "if row.session_id is None:",
                "if True:",
            ),
        ),
    ),
    Property(
        "A text knows the longest beginning that has come before it.",
        f"{CHATS}test_a_text_knows_the_longest_beginning_that_has_come",
        (
            Fault(
                "it is compared with the text behind it alone",
                SEEN,
                "self._sorted[max(0, place - 1) : place + 1]",
                "self._sorted[place : place + 1]",
            ),
        ),
    ),
    Property(
        "Sessions begin with other texts.",
        f"{TESTS}test_sessions_begin_with_other_texts",
        (
            Fault(
                "sessions begin alike",
                TEXTS,
                "self._firsts.add(own)",
                "pass",
            ),
        ),
    ),
    Property(
        "A request comes as long after the last that it follows as the trace says.",
        f"{REPLAYS}test_every_kind_of_mode_replays_a_trace",
        (
            Fault(
                "a request comes with the first end",
                ARRIVALS,
                "if not self._unmet[follower]:",
                "if self._unmet[follower] >= 0 and follower in self._unmet:",
            ),
        ),
    ),
    Property(
        "The hits of an unlimited cache are shares of all prompt tokens.",
        f"{REPLAYS}test_every_kind_of_mode_replays_a_trace",
        (
            Fault(
                "of prompts that have hits alone",
                COMPUTING,
                "if request.num_known_tokens is not None]",
                "if request.num_known_tokens]",
            ),
        ),
    ),
)
