"""Of what prompts begin with, what answers end at, and the check of a model."""

from __future__ import annotations

from faults.fault import Fault, Property

FILE = "test_prompt_ids.py::"
CHECK = "test_gguf_check.py::"
TOKENIZER = "model/tokenizer.py"
VOCABULARY = "model/gguf/vocabulary.py"
REFERENCE = "bench/gguf_reference.py"

PROPERTIES = (
    Property(
        "Prompts of a directory, a converted copy and a GGUF file are those of transformers.",
        f"{FILE}test_a_directory_and_its_copy_make_the_ids_of_transformers[bytes]",
        (
            Fault(
                "a BOS because a config names one", TOKENIZER, "if self.around is None:", "if True:"
            ),
        ),
    ),
    Property(
        "Prompts of a GGUF file that says nothing begin as llama.cpp's.",
        f"{FILE}test_each_pre_tokenizer_has_llama_cpps_default",
        (
            Fault(
                "no BOS of a pre-tokenizer",
                VOCABULARY,
                '"pixtral", "lfm2", "tekken")\n# SentencePiece',
                '"pixtral")\n# SentencePiece',
            ),
            Fault(
                "a BOS that is none of the tokens",
                VOCABULARY,
                "if not isinstance(found, int) or not 0 <= found < count:",
                "if False:",
            ),
        ),
    ),
    Property(
        "Answers of a GGUF file end at the names at which llama.cpp's end.",
        f"{FILE}test_an_answer_ends_at_tokens_of_these_names[<|im_end|>]",
        (
            Fault(
                "stated end tokens alone",
                VOCABULARY,
                "(*stated.values(), *named.values())",
                "stated.values()",
            ),
        ),
    ),
    Property(
        "User-defined tokens of a GGUF file match runs of spaces.",
        "test_gguf.py::test_a_sentencepiece_vocabulary_is_that_of_the_library[True]",
        (
            Fault(
                "spaces that are left bare",
                VOCABULARY,
                'token.replace(" ", SPACE) if kind',
                "token if kind",
            ),
        ),
    ),
    Property(
        "The check of a GGUF file reads it without the loader.",
        f"{CHECK}test_a_loader_that_is_wrong_is_found[True-llama]",
        (
            Fault(
                "weights as the loader reads them",
                "bench/model_check.py",
                "        if is_gguf(path):\n            parts",
                "        if False:\n            parts",
            ),
        ),
    ),
    Property(
        "The reader of the check has the order of Hugging Face.",
        f"{CHECK}test_values_are_read_in_the_order_of_hugging_face",
        (
            Fault(
                "heads of queries for keys",
                REFERENCE,
                '"attn_k": "head_count_kv"',
                '"attn_k": "head_count"',
            ),
            Fault("rows in the order of the file", REFERENCE, "if key is not None:", "if False:"),
        ),
    ),
    Property(
        "Ids, end tokens and logits that are not llama.cpp's are a difference.",
        f"{CHECK}test_llama_cpp_has_a_say_where_it_is_installed[ends]",
        (
            Fault(
                "ids and end tokens that change no outcome",
                "bench/model_check.py",
                "check.outcome = DIFFERS\n            shown",
                "shown",
            ),
        ),
    ),
)
