"""Of weights that a checkpoint stores as numbers: blocks of GGUF files, the formats of other
programs, and groups of inputs with a scale."""

from __future__ import annotations

from faults.fault import Fault, Property

MODELS = "test_quantised.py::test_a_model_computes_as_transformers_on_the_defined_weights"
BLOCKS = "model/gguf/blocks.py"
GROUPED = "model/linear/grouped.py"
LINEAR = "test_linear.py::test_a_packed_layer_multiplies_and_a_row_keeps_its_bits"
PACKED = "model/linear/packed"
QUANTIZED = "model/checkpoint/quantized/"

PROPERTIES = (
    Property(
        "Blocks of GGUF files are dequantised to the bit.",
        "test_gguf.py::test_blocks_are_dequantised_to_the_bit",
        (
            Fault(
                "two nibbles of a byte beside each other",
                BLOCKS,
                "return np.concatenate([qs & 15, qs >> 4], axis=1)\n\n\ndef fifth",
                "return np.stack([qs & 15, qs >> 4], axis=2).reshape(-1, 32)\n\n\ndef fifth",
            ),
            Fault("a fifth bit that counts half", BLOCKS, "return bits << 4", "return bits << 3"),
            Fault(
                "scales of six bits that are off by one",
                BLOCKS,
                "(high >> 2 * g & 3) << 4) - 32",
                "(high >> 2 * g & 3) << 4) - 31",
            ),
            Fault(
                "a minimum with the other sign",
                BLOCKS,
                "return Groups(signed(numbers), scales, -minima)",
                "return Groups(signed(numbers), scales, minima)",
            ),
            Fault(
                "planes of bits in the other order",
                BLOCKS,
                "high = (b[:, None, :32] >> planes & 1)",
                "high = (b[:, None, :32] >> planes[::-1] & 1)",
            ),
            Fault(
                "a zero of six bits that is off by one",
                BLOCKS,
                "(low | high << 4).reshape(-1, 256), 32)",
                "(low | high << 4).reshape(-1, 256), 31)",
            ),
        ),
    ),
    Property(
        "Rows and columns of a GGUF tensor are those of the whole tensor.",
        "test_gguf.py::test_slices_are_those_of_the_whole_tensor",
        (
            Fault(
                "q and k in the order of the file",
                "model/checkpoint/gguf_tensors.py",
                "is_permuted = self.architecture.is_permuted and",
                "is_permuted = False and",
            ),
            Fault(
                "q and k permuted once more",
                "model/checkpoint/gguf_tensors.py",
                "reshape(-1, head_dim // 2, 2)",
                "reshape(-1, 2, head_dim // 2)",
            ),
            Fault(
                "biases of q and k in the order of the file",
                "model/checkpoint/gguf_weights.py",
                "(whole if placed.rows is None else whole[placed.rows])[rows]",
                "whole[rows]",
            ),
            Fault(
                "rows of a head from its first one on",
                "model/checkpoint/gguf_weights.py",
                "placed.rows[first:last]",
                "placed.rows[: last - first]",
            ),
            Fault(
                "scales of the groups one before",
                "model/checkpoint/gguf_weights.py",
                "part = slice(first // kind.group, last // kind.group)",
                "part = slice(first // kind.group - 1, last // kind.group - 1)",
            ),
        ),
    ),
    Property(
        "Packing numbers in groups loses nothing.",
        "test_group_properties.py::test_packing_loses_nothing",
        (
            Fault(
                "upper halves of bytes before the lower ones",
                GROUPED,
                "halves = torch.cat([both & 15, both >> 4], dim=2)",
                "halves = torch.cat([both >> 4, both & 15], dim=2)",
            ),
            Fault(
                "scales of other outputs",
                GROUPED,
                "self.scale[:, outputs].T,",
                "self.scale[:, outputs].roll(1, 1).T,",
            ),
            Fault(
                "scales of the neighbouring group",
                GROUPED,
                "weights = numbers * self.scale.float().unsqueeze(2)",
                "weights = numbers * self.scale.float().roll(1, 1).unsqueeze(2)",
            ),
            Fault(
                "a minimum that is taken off",
                GROUPED,
                "weights += self.minimum.float()",
                "weights -= self.minimum.float()",
            ),
        ),
    ),
    Property(
        "Matrices of several formats are one below the other in a format that holds them.",
        "test_grouped.py::test_parts_of_several_formats_are_stacked_exactly",
        (
            Fault(
                "scales of wider groups in turn",
                GROUPED,
                "scale = self.scale.to(dtype).repeat_interleave(repeats, dim=1)",
                "scale = self.scale.to(dtype).repeat(1, repeats)",
            ),
        ),
    ),
    Property(
        "The shards of ranks are parts of the whole layers.",
        "test_group_properties.py::test_shards_make_the_whole_layers_or_are_refused",
        (
            Fault(
                "ranks that cut a group",
                "setup/model_checks.py",
                "if any(column % LEAST_GROUP for column in piece.columns):",
                "if any(column % 8 for column in piece.columns):",
            ),
            Fault(
                "scales of the first rank on every rank",
                "model/checkpoint/gguf_weights.py",
                "part = slice(first // kind.group, last // kind.group)",
                "part = slice(0, (last - first) // kind.group)",
            ),
        ),
    ),
    Property(
        "Ranks share the units of a quantised MLP in whole groups.",
        "test_quantised.py::test_ranks_share_a_quantised_mlp_in_whole_groups",
        (
            Fault(
                "units that are shared one by one",
                "distributed/tensor_parallel.py",
                "group = next(held, 1)",
                "group = 1",
            ),
            Fault(
                "units of other ranks in gate and up",
                "model/checkpoint/weight_map.py",
                "[(name, units, width) for name in up_names]",
                "[(name, (0, units[1] - units[0]), width) for name in up_names]",
            ),
        ),
    ),
    Property(
        "Packed layers compute all channels, those that fill no vector or block too.",
        f"{LINEAR}[float32-shape3-12]",
        (
            Fault(
                "last channels that fill no vector",
                f"{PACKED}_float32.h",
                "width = std::min<int64_t>(WIDTH, N - channel);",
                "width = std::min<int64_t>(WIDTH, (N - channel) / 16 * 16);",
            ),
        ),
    ),
    Property(
        "GPTQ's weights are those of its definition.",
        f"{MODELS}[gptq, zero points]",
        (
            Fault(
                "zero points of the first version as of the second",
                f"{QUANTIZED}gptq.py",
                "return stored.T.to(torch.int16) + (not self.method.is_second)",
                "return stored.T.to(torch.int16)",
            ),
            Fault(
                "groups that begin at the first input of a slice",
                f"{QUANTIZED}matrix.py",
                "groups = torch.arange(columns.start, columns.stop, kind.group) //",
                "groups = torch.arange(0, columns.stop - columns.start, kind.group) //",
            ),
        ),
    ),
    Property(
        "GPTQ's inputs have the groups that act-order gives them.",
        f"{MODELS}[gptq, act-order]",
        (
            Fault(
                "groups of inputs from the first column on",
                f"{QUANTIZED}matrix.py",
                "if self.group_of is None else self.group_of[columns]",
                "if self.group_of is None else self.group_of[: len(inputs)]",
            ),
            Fault(
                "numbers in the order of the inputs",
                f"{QUANTIZED}matrix.py",
                "codes = codes[:, self.order]",
                "pass",
            ),
            Fault(
                "exact products of activations in their own order",
                "model/linear/packed_float32.h",
                "to_float(row[order[k]])",
                "to_float(row[k])",
            ),
            Fault(
                "layers in torch that take activations in their own order",
                "model/linear/grouped.py",
                "x.index_select(-1, self.order)",
                "x",
            ),
        ),
    ),
    Property(
        "AWQ's weights are those of its definition.",
        f"{MODELS}[awq]",
        (
            Fault(
                "outputs in the order of their bits",
                f"{QUANTIZED}awq.py",
                "PLACES = (0, 4, 1, 5, 2, 6, 3, 7)",
                "PLACES = (0, 1, 2, 3, 4, 5, 6, 7)",
            ),
            Fault(
                "outputs in the inverse order",
                f"{QUANTIZED}awq.py",
                "PLACES = (0, 4, 1, 5, 2, 6, 3, 7)",
                "PLACES = (0, 2, 4, 6, 1, 3, 5, 7)",
            ),
        ),
    ),
    Property(
        "Packed integers of compressed-tensors have their sign.",
        f"{MODELS}[packed, group]",
        (
            Fault(
                "packed integers without a sign",
                f"{QUANTIZED}compressed.py",
                "return torch.full(shape, self.middle, dtype=torch.int16)",
                "return torch.full(shape, 0, dtype=torch.int16)",
            ),
        ),
    ),
    Property(
        "Plain integers of compressed-tensors have their sign.",
        f"{MODELS}[integers, zero points]",
        (
            Fault(
                "zero points without their sign",
                f"{QUANTIZED}compressed.py",
                "rows).to(torch.int16) + self.middle\n\n    def codes",
                "rows).to(torch.int16)\n\n    def codes",
            ),
            Fault(
                "minima of numbers without their least",
                f"{QUANTIZED}matrix.py",
                "return scale.float() * (-self.format.least - zeros)",
                "return scale.float() * -zeros + self.format.least",
            ),
        ),
    ),
    Property(
        "FP8's weights have the scales of their blocks.",
        f"{MODELS}[fp8, ragged blocks]",
        (
            Fault(
                "blocks of outputs from the first row on",
                f"{QUANTIZED}matrix.py",
                "outputs = torch.arange(rows.start, rows.stop) // self.block[0]",
                "outputs = torch.arange(rows.stop - rows.start) // self.block[0]",
            ),
            Fault(
                "blocks of inputs as high as wide",
                f"{QUANTIZED}matrix.py",
                "inputs = torch.arange(columns.start, columns.stop) // self.block[1]",
                "inputs = torch.arange(columns.start, columns.stop) // self.block[0]",
            ),
            Fault(
                "scales of the first rows for all parts",
                f"{QUANTIZED}matrix.py",
                "weights[place] *= scale[outputs[place]][:, inputs]",
                "weights[place] *= scale[outputs[: len(weights[place])]][:, inputs]",
            ),
        ),
    ),
)
