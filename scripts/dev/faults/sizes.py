"""Of units, bytes of experts, and the layers that have a window, experts or states."""

from __future__ import annotations

from faults.fault import Fault, Property

UNITS = "test_units.py::"
BYTES = "test_bytes.py::"
BOUNDS = "test_layer_bounds.py::"
COSTS = "hardware/costs.py"
WINDOWS = "model/families/windows.py"
MIXTURES = "model/families/mixtures.py"
PLANNED = "model/families/planned.py"

PROPERTIES = (
    Property(
        "A label names the unit in which a field is printed.",
        f"{UNITS}test_labels_name_the_unit_in_which_a_field_is_printed",
        (
            Fault(
                "MiB for MB",
                "records/metrics.py",
                'label="peak memory, GB",\n        digits=2,\n        scale=1e-9,',
                'label="peak memory, GB",\n        digits=2,\n        scale=2**-30,',
            ),
            Fault(
                "MB for GB",
                "records/metrics.py",
                'label="bytes to read, GB",\n        digits=2,\n        scale=1e-9,',
                'label="bytes to read, GB",\n        digits=2,\n        scale=1e-6,',
            ),
        ),
    ),
    Property(
        "Rates and latencies of flags have the units that their help says.",
        f"{UNITS}test_rates_and_latencies_of_flags",
        (
            Fault(
                "GiB/s",
                "cli/plan.py",
                "Hardware(1e9 * args.bandwidth,",
                "Hardware(2**30 * args.bandwidth,",
            ),
            Fault("GFLOP/s", "cli/plan.py", "1e12 * args.flops)", "1e9 * args.flops)"),
            Fault("latencies in ms", "cli/plan.py", "Link(1e-6 * latency,", "Link(1e-3 * latency,"),
            Fault(
                "the overhead of a forward for each layer",
                "cli/plan.py",
                "1e-6 * args.overhead_us / num_layers",
                "1e-6 * args.overhead_us",
            ),
        ),
    ),
    Property(
        "A link in Gbit/s has an eighth of its bits in bytes.",
        f"{UNITS}test_a_link_in_gbit",
        (
            Fault("Gbit/s for GB/s", "cli/simulate.py", "BITS_PER_S = 1e9 / 8", "BITS_PER_S = 1e9"),
            Fault("Gibit/s", "cli/simulate.py", "BITS_PER_S = 1e9 / 8", "BITS_PER_S = 2**27"),
        ),
    ),
    Property(
        "What a probe prints has the unit of its label.",
        f"{UNITS}test_what_a_probe_prints",
        (
            Fault(
                "ms for us",
                "cli/probe.py",
                '("overhead of a layer, {}, us", "layer_overhead_s", 1, 1e6)',
                '("overhead of a layer, {}, us", "layer_overhead_s", 1, 1e3)',
            ),
            Fault(
                "GFLOP/s for TFLOP/s",
                "cli/probe.py",
                '("matrix product, {}, TFLOP/s", "flops_per_s", 3, 1e-12)',
                '("matrix product, {}, TFLOP/s", "flops_per_s", 3, 1e-9)',
            ),
        ),
    ),
    Property(
        "Bytes that are printed are in GB.",
        f"{UNITS}test_bytes_that_are_printed",
        (
            Fault(
                "GiB of a memory plan",
                "setup/memory_plan.py",
                'f"{self.total / 1e9:.2f} GB"',
                'f"{self.total / 2**30:.2f} GB"',
            ),
            Fault(
                "GiB/s of a run",
                "records/describe.py",
                "{bandwidth / 1e9:.1f} GB/s read",
                "{bandwidth / 2**30:.1f} GB/s read",
            ),
        ),
    ),
    Property(
        "The system counts in KiB and in nanoseconds.",
        f"{UNITS}test_what_the_system_says",
        (
            Fault(
                "kB of free memory",
                "setup/memory_check.py",
                'int(fields["MemAvailable"].split()[0]) * 1024',
                'int(fields["MemAvailable"].split()[0]) * 1000',
            ),
            Fault(
                "kB of peak memory",
                "hardware/timing.py",
                "int(s.split()[1]) * 1024",
                "int(s.split()[1]) * 1000",
            ),
            Fault(
                "waits in us", "hardware/other_load.py", "split()[1]) / 1e9", "split()[1]) / 1e6"
            ),
        ),
    ),
    Property(
        "Bytes of experts are those of transformers' parameters.",
        f"{BYTES}test_bytes_of_experts_are_those_of_transformers",
        (
            Fault(
                "experts without their biases",
                COSTS,
                "expert_numbers = config.mlp_inputs * (last - first) + config.hidden_size",
                "expert_numbers = 2 * (last - first)",
            ),
            Fault(
                "the gate or the other half",
                COSTS,
                "pair = [(config.mlp_inputs * width,",
                "pair = [(width,",
            ),
            Fault(
                "experts counted half from a loaded model",
                "bench/roofline.py",
                "for layer in (*experts.gate_up, *experts.down):",
                "for layer in experts.gate_up:",
            ),
        ),
    ),
    Property(
        "A forward reads the experts that transformers' routers choose for its tokens.",
        f"{BYTES}test_a_forward_reads_the_experts_that_transformers_chooses",
        (
            Fault(
                "all experts of a layer are read",
                "bench/roofline.py",
                "expert_total * counts.experts_read // num_experts",
                "expert_total * counts.num_forwards",
            ),
            Fault(
                "an expert for each token",
                "model/experts.py",
                "self.num_read += len(touched)",
                "self.num_read += chosen.numel()",
            ),
            Fault(
                "the experts of one token",
                COSTS,
                "c.experts.touched(B * T)",
                "c.experts.touched(B)",
            ),
        ),
    ),
    Property(
        "Layers have the types of those of transformers, at every bound of a config.",
        f"{BOUNDS}test_layers_are_of_the_types_of_transformers",
        (
            Fault(
                "Qwen's windows from the next layer on",
                WINDOWS,
                "SLIDING if layer >= first else FULL",
                "SLIDING if layer > first else FULL",
            ),
            Fault(
                "windows of Qwen's mixture up to the bound",
                MIXTURES,
                "i < most and i % 2 == 0",
                "i <= most and i % 2 == 0",
            ),
            Fault(
                "windows of Qwen's mixture from the second layer on",
                MIXTURES,
                "i < most and i % 2 == 0",
                "i < most and i % 2 == 1",
            ),
            Fault(
                "the first layer of Gemma 3 sees all",
                "model/families/gemma.py",
                "[SLIDING if (layer + 1) % pattern else FULL for",
                "[SLIDING if layer % pattern else FULL for",
            ),
            Fault(
                "gpt-oss begins without a window",
                "model/families/gpt_oss.py",
                "(SLIDING, FULL)[layer % 2]",
                "(FULL, SLIDING)[layer % 2]",
            ),
            Fault(
                "the last layer of Gemma 4 by its pattern",
                PLANNED,
                "*types, _ = types_of_layers(raw, (SLIDING, FULL), 6, SLIDING)\n    types.append",
                "types = types_of_layers(raw, (SLIDING, FULL), 6, SLIDING)\n    [].append",
            ),
            Fault(
                "linear attention begins with a full layer",
                PLANNED,
                "[otherwise if (layer + 1) % interval else FULL for",
                "[otherwise if layer % interval else FULL for",
            ),
        ),
    ),
    Property(
        "Layers have experts where those of transformers do, at every bound of a config.",
        f"{BOUNDS}test_layers_have_experts_where_those_of_transformers_do",
        (
            Fault(
                "experts a layer too early", MIXTURES, "if (layer + 1) % step}", "if layer % step}"
            ),
            Fault(
                "one dense layer too many",
                PLANNED,
                "LayerKind(has_mlp=n < num_dense, mixer=mixer)",
                "LayerKind(has_mlp=n <= num_dense, mixer=mixer)",
            ),
        ),
    ),
)
