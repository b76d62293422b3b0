"""Faults of caches with fewer bits."""

from __future__ import annotations

from faults.fault import Fault, Property

KV = "test_kv_dtype.py::"
QUANTISED = "test_quantised_kv.py::"
COPY = "speculation/copied_kv.py"
TRITON = "attention/triton_kernels.py"

PROPERTIES = (
    Property(
        "A cache of codes is the definition's, for plain decoding as for drafts.",
        f"{KV}test_logits_are_those_of_transformers_with_a_rounded_cache",
        (
            Fault(
                "every token of a tile has the scales of its first",
                "kv/layout.py",
                "        scales = self.scales(pool)[:, slots // TILE, :, slots % TILE]",
                "        scales = self.scales(pool)[:, slots // TILE, :, 0 * slots]",
            ),
            Fault(
                "no int4 code is the least",
                "kv/layout.py",
                ".round().clamp(-8, 7)",
                ".round().clamp(-7, 7)",
            ),
            Fault(
                "high codes without their sign",
                "kv/layout.py",
                "[(grouped << 4) >> 4, grouped >> 4]",
                "[(grouped << 4) >> 4, (grouped >> 4) & 15]",
            ),
            Fault(
                "7 bits of 8",
                "kv/layout.py",
                "MOST_CODE = 127",
                "MOST_CODE = 63",
            ),
        ),
    ),
    Property(
        "Drafts of a copy in fewer bits read every committed token, rounded, and no other.",
        f"{QUANTISED}test_logits_of_drafts_are_those_over_rounded_numbers[int4-two groups-native]",
        (
            Fault(
                "what was committed since the prompt is not appended",
                COPY,
                "        cache.advance(rows, most)\n",
                "        cache.advance(rows, most * (most > 5))\n",
            ),
            Fault(
                "a rejected token stays in the copy",
                COPY,
                "        self.rewind(rows, source.lengths_of(rows))\n",
                "        self.rewind(rows, source.lengths_of(rows).plus(1))\n",
            ),
            Fault(
                "the last part of a prompt is left out",
                COPY,
                "range(0, count, chunk)",
                "range(0, count - chunk, chunk)",
            ),
            Fault(
                "a group has the scale of its neighbour",
                "kv/layout.py",
                "return (low | high << 4).flatten(-2), scales.squeeze(-1)",
                "return (low | high << 4).flatten(-2), scales.squeeze(-1).roll(1, 0)",
            ),
        ),
    ),
    Property(
        "Reads of a copy in fewer bits have its own bytes.",
        f"{QUANTISED}test_reads_of_drafts_are_counted_in_the_bytes_of_the_copy"
        "[int4-torch.bfloat16-native steps]",
        (
            Fault(
                "as many as the target's",
                "runner/model_runner.py",
                "keys, draft_rows, self.bytes_per_token)",
                "keys, draft_rows, self.counts.bytes_per_token)",
            ),
        ),
    ),
    Property(
        "The kernels read an int4 cache as its definition says.",
        "test_attention.py::test_backend_equals_attention_written_out"
        "[native-(6, 2, 16)-FullKV()-torch.uint8]",
        (
            Fault(
                "a score has the scale of the token before",
                "attention/cpp/native_codes.h",
                "load_scales(tile.key_scales + g * TILE + W * (i + v))",
                "load_scales(tile.key_scales + g * TILE + W * (i + v) - 1)",
            ),
            Fault(
                "a prefill takes the scale of a tile's first value",
                "attention/cpp/native_wide.h",
                "to_float(tile.value_scales[g * TILE + t])",
                "to_float(tile.value_scales[g * TILE])",
            ),
            Fault(
                "queries are not transformed as keys are",
                "attention/cpp/native_codes.h",
                "    Form::mix_query(numbers);\n",
                "",
            ),
            Fault(
                "a transformed query is not divided",
                "attention/cpp/native_int4.h",
                "q[d] *= 1.0f / MIXED;",
                "q[d] *= 1.0f;",
            ),
            Fault(
                "a key is transformed in parts of eight",
                "attention/cpp/native_int4.h",
                "constexpr int MIXED = 16;",
                "constexpr int MIXED = 8;",
            ),
            Fault(
                "quotients are cut off",
                "attention/cpp/native_int4.h",
                "std::lrint(float(numbers[d] * inverse))",
                "int(numbers[d] * inverse)",
            ),
        ),
    ),
    Property(
        "The kernels read an FP8 cache as its definition says.",
        "test_attention.py::test_backend_equals_attention_written_out"
        "[native-(6, 2, 16)-FullKV()-torch.float8_e4m3fn]",
        (
            Fault(
                "the last two numbers of an entry are its first",
                "attention/cpp/native_fp8.h",
                "std::memcpy(to + WIDTH + W * i, &last, sizeof(last));",
                "std::memcpy(to + WIDTH + W * i, &first, sizeof(last));",
            ),
            Fault(
                "weights lie a pair of values further",
                "attention/cpp/native_fp8.h",
                "widened->values + tile.low % 4 / 2 * HEAD_SIZE,",
                "widened->values + (tile.low % 4 / 2 + 1) * HEAD_SIZE,",
            ),
            Fault(
                "numbers are cut off",
                "attention/cpp/native_fp8.h",
                "((bits + 0x7ffff + (bits >> 20 & 1)) >> 20)",
                "(bits >> 20)",
            ),
        ),
    ),
    Property(
        "Means of keys that are stored as codes are those of the keys.",
        "test_verified.py::test_mean_keys[torch.bfloat16-torch.uint8]",
        (
            Fault(
                "means of int4 keys are those of their transforms",
                "speculation/block_choice.cpp",
                "mean[d] = a + b, mean[d + half] = a - b;",
                "mean[d] = a, mean[d + half] = b;",
            ),
        ),
    ),
    Property(
        "FP8 has the numbers of its definition, the least and the largest too.",
        "test_attention.py::test_numbers_of_fp8[native-torch.float8_e4m3fn]",
        (
            Fault(
                "the least numbers are zeros",
                "attention/cpp/native_fp8.h",
                "code = uint32_t(std::lrint(magnitude * (1 / LEAST)));",
                "code = 0;",
            ),
            Fault(
                "what is too large is no number",
                "attention/cpp/native_fp8.h",
                "LARGEST = 0x7e",
                "LARGEST = 0x7f",
            ),
        ),
    ),
    Property(
        "Kernels for GPUs have FP8's numbers.",
        "test_attention.py::test_numbers_of_fp8[triton-torch.float8_e4m3fn]",
        (
            Fault(
                "a program cuts FP8 off",
                TRITON,
                "rest + 0x7FFFF + ((rest >> 20) & 1)",
                "rest",
            ),
            Fault(
                "a program has no least numbers",
                TRITON,
                "tl.where(rest < (121 << 23), least, normal)",
                "tl.where(rest < (121 << 23), 0, normal)",
            ),
        ),
    ),
    Property(
        "A token over codes has the same bits in decoding and in a verification.",
        "test_attention.py::test_native_gives_a_token_the_same_bits_alone_and_with_others"
        "[5-()-None-(6, 2, 64)-torch.int8]",
        (
            Fault(
                "weights are rounded by the scales of values that a query does not see",
                "attention/cpp/native_codes_softmax.h",
                "(lane + W * i >= int(from)) & (lane + W * i < int(to)) ? x[i] : vec{}",
                "x[i]",
            ),
            Fault(
                "a query has the rounded scales of the query before",
                "attention/cpp/native_codes_softmax.h",
                "tile == of.values && from == first && to == end",
                "tile == of.values",
            ),
        ),
    ),
    Property(
        "A verification of many tokens has the bits of decoding.",
        "test_attention.py::test_native_gives_a_token_the_same_bits_alone_and_with_others"
        "[40-()-None-(6, 2, 64)-torch.bfloat16]",
        (
            Fault(
                "32 new tokens are a prompt's",
                "attention/cpp/native_problem.h",
                "LONG_CHUNK = 256;",
                "LONG_CHUNK = 32;",
            ),
        ),
    ),
    Property(
        "Queries of float32 keep their bits over codes.",
        "test_attention.py::test_float32_queries_read_codes[64-1-torch.int8-native]",
        (
            Fault(
                "their second integers are left out",
                "attention/cpp/native_codes.h",
                "        if (TERMS == 1) return whole;\n",
                "        return whole;\n",
            ),
            Fault(
                "weights have one integer",
                "attention/cpp/native_codes_softmax.h",
                "            if (TERMS == 1) continue;\n",
                "            continue;\n",
            ),
        ),
    ),
    Property(
        "Kernels for GPUs read and write an int4 cache as its definition says.",
        f"{QUANTISED}test_logits_of_drafts_are_those_over_rounded_numbers[int4-two groups-triton]",
        (
            Fault(
                "a program's queries are not transformed as keys are",
                TRITON,
                "        queries = tl.reshape(mixed.to(queries.dtype), (BLOCK_M, BLOCK_D))\n",
                "",
            ),
            Fault(
                "a program transforms keys in three steps of four",
                TRITON,
                "tl.static_range(4)",
                "tl.static_range(3)",
            ),
            Fault(
                "low codes lie between high ones",
                TRITON,
                "tl.permute(both, (0, 1, 3, 2))",
                "tl.permute(both, (0, 1, 2, 3))",
            ),
            Fault(
                "a program takes a tile's first scales",
                TRITON,
                "tile + TILE * code_bytes + token * 2",
                "tile + TILE * code_bytes + token * 0",
            ),
            Fault(
                "a program cuts quotients off",
                TRITON,
                "return (x + 12582912.0) - 12582912.0",
                "return x",
            ),
        ),
    ),
    Property(
        "Kernels for GPUs read and write an int8 cache as its definition says.",
        f"{QUANTISED}test_logits_of_drafts_are_those_over_rounded_numbers[int8-two groups-triton]",
        (
            Fault(
                "a program takes the scale of the token before",
                TRITON,
                "tile + TILE * SIZE + token * 4",
                "tile + TILE * SIZE + (token - 1) * 4",
            ),
            Fault(
                "a program rounds to 128ths",
                TRITON,
                "tl.div_rn(127.0, ",
                "tl.div_rn(126.0, ",
            ),
        ),
    ),
    Property(
        "The flag stores the target's cache in codes.",
        f"{KV}test_drafts_are_lossless_over_a_cache_of_codes[int8 --draft self --budget 49]",
        (
            Fault(
                "the flag stores no codes",
                "setup/loading.py",
                "kv_dtype=None if plan.coded_kv is None else POOL_DTYPES[plan.coded_kv],",
                "kv_dtype=None,",
            ),
        ),
    ),
    Property(
        "Records of caches in other dtypes are not compared.",
        "test_gate_rule.py::test_the_first_cause_is_named_where_conditions_differ[int8 cache]",
        (
            Fault(
                "the dtype of the cache left out",
                "records/comparison/conditions.py",
                '        "kv_dtype": kv_dtype_of(config),\n',
                "",
            ),
        ),
    ),
    Property(
        "A query that is not finite has an output that is not, though it is rounded to integers.",
        "test_attention.py::test_an_output_of_a_query_that_is_not_finite_is_not_either",
        (
            Fault(
                "no NaN of a query",
                "attention/cpp/native_codes.h",
                "to->step = has_numbers ? most / MOST_STEPS : not_a_number();",
                "to->step = most / MOST_STEPS;",
            ),
        ),
    ),
)
