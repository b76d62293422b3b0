"""Of GGUF files of models with linear attention: what the converter does to their tensors, and the
head for multi-token prediction, also in a converted checkpoint."""

from __future__ import annotations

from faults.fault import Fault, Property

FILE = "test_gguf_hybrids.py::"
WEIGHTS = "model/checkpoint/gguf_weights.py"
TENSORS = "model/checkpoint/gguf_tensors.py"
KEYS = "model/families/gguf_architectures.py"

PROPERTIES = (
    Property(
        "Tensors of linear attention in a GGUF file are those of the checkpoint.",
        f"{FILE}test_tensors_are_those_of_the_checkpoint[qwen35]",
        (
            Fault(
                "value heads in the order of the file",
                TENSORS,
                "        if self.is_tiled:",
                "        if False:",
            ),
            Fault(
                "value heads tiled once more",
                TENSORS,
                "heads.reshape(self.group, -1).T",
                "heads.reshape(-1, self.group).T",
            ),
            Fault(
                "a decay that is not its logarithm",
                WEIGHTS,
                "return (-vector.double()).log().float()",
                "return vector",
            ),
            Fault(
                "norms with 1 added",
                TENSORS,
                "offset=self.names.norm_offset if has_offset else 0.0",
                "offset=0.0",
            ),
            Fault(
                "1 taken off the norm of an output",
                TENSORS,
                '{"norm.weight": PlacedTensor(tensor)}',
                '{"norm.weight": PlacedTensor(tensor, offset=1.0)}',
            ),
            Fault(
                "columns of the output in the order of the file",
                TENSORS,
                "PlacedTensor(tensor, columns=values)",
                "PlacedTensor(tensor)",
            ),
            Fault(
                "scales of columns that have moved",
                WEIGHTS,
                "groups.scale[:, order],",
                "groups.scale,",
            ),
            Fault(
                "the rate of writing for that of decay",
                TENSORS,
                '"ssm_beta": {"in_proj_b.weight"',
                '"ssm_beta": {"in_proj_a.weight"',
            ),
        ),
    ),
    Property(
        "A GGUF file with linear attention computes as transformers.",
        f"{FILE}test_a_model_computes_as_transformers[qwen35-F32]",
        (
            Fault(
                "gates in place of queries",
                "model/checkpoint/weight_map.py",
                "return [*queries, (k, keys, num_keys), (v, keys, num_keys), *gates]",
                "return [*gates, (k, keys, num_keys), (v, keys, num_keys), *queries]",
            ),
            Fault(
                "all dimensions of a head rotated",
                KEYS,
                'rotated = own.get("rope.dimension_count", known["head_dim"])',
                'rotated = known["head_dim"]',
            ),
        ),
    ),
    Property(
        "Tensors of Qwen3-Next in a GGUF file are those of its checkpoint.",
        f"{FILE}test_tensors_are_those_of_the_checkpoint[qwen3next]",
        (
            Fault(
                "rates by kind in place of by key head",
                TENSORS,
                "reshape(-1, 2, self.group).swapaxes(0, 1)",
                "reshape(2, -1, self.group)",
            ),
        ),
    ),
    Property(
        "Older files of Qwen3-Next have one projection, by key head.",
        f"{FILE}test_older_files_of_qwen3_next_have_one_projection",
        (
            Fault(
                "the gate of the output in place of values",
                TENSORS,
                "q, k, v, z = np.split(",
                "q, k, z, v = np.split(",
            ),
            Fault(
                "ups in place of gates",
                TENSORS,
                '"ffn_gate_up_exps": [gate, up]',
                '"ffn_gate_up_exps": [up, gate]',
            ),
        ),
    ),
    Property(
        "The head of a GGUF file is behind the layers of the model.",
        f"{FILE}test_a_head_is_that_of_the_checkpoint[qwen35]",
        (
            Fault(
                "a layer of the head among the model's",
                KEYS,
                "num_layers = num_blocks - num_mtp_layers",
                "num_layers = num_blocks",
            ),
            Fault(
                "the norm of the state for that of the token",
                TENSORS,
                '"nextn.enorm": "pre_fc_norm_embedding"',
                '"nextn.enorm": "pre_fc_norm_hidden"',
            ),
        ),
    ),
    Property(
        "Metadata of linear attention that the tensors contradict are refused.",
        f"{FILE}test_metadata_that_the_tensors_contradict_are_refused",
        (
            Fault(
                "pairs of dimensions without a place in the text",
                KEYS,
                "section >= 3 * sections[section % 3]",
                "False",
            ),
        ),
    ),
    Property(
        "A tensor of linear attention of another size than the metadata say is named.",
        f"{FILE}test_metadata_that_the_tensors_contradict_are_refused[other key heads]",
        (
            Fault(
                "sizes that nobody compares",
                TENSORS,
                "if stored_size != size:",
                "if False:",
            ),
        ),
    ),
    Property(
        "A converted checkpoint has its head for multi-token prediction.",
        f"{FILE}test_a_head_is_converted_with_its_model[file-int4]",
        (
            Fault(
                "a head that is not written",
                "cli/checkpoints.py",
                "mtp_head=mtp_config,",
                "",
            ),
            Fault(
                "a head's groups that are not read",
                "model/checkpoint/quantized/converted.py",
                "if config.num_mtp_layers:",
                "if False:",
            ),
        ),
    ),
    Property(
        "Weights of a tensor with several parts are counted once.",
        f"{FILE}test_matrices_are_held_in_groups_on_every_rank[qwen35-1]",
        (
            Fault(
                "a whole tensor for each part",
                "model/checkpoint/source.py",
                "sum((piece.rows[1] - piece.rows[0]) * piece.width",
                "sum(piece.full_shape[0] * piece.width",
            ),
        ),
    ),
)
