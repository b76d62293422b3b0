"""Of mixtures of experts: what a token gets, and what a forward reads."""

from __future__ import annotations

from faults.fault import Fault, Property

EXPERTS = "test_experts.py::"
SOURCE = "model/experts.py"
OPERATORS = "model/elementwise/operators.py"

PROPERTIES = (
    Property(
        "A mixture of experts is the weighted sum of the best.",
        f"{EXPERTS}test_a_mixture_is_its_definition",
        (
            Fault(
                "weights that do not add up to one",
                OPERATORS,
                "largest[:, :num_used] if renormalises else largest",
                "largest",
            ),
            Fault(
                "the weight of another expert of the token",
                SOURCE,
                "weights[token, place])",
                "weights[token, 0])",
            ),
            Fault(
                "an expert fewer",
                SOURCE,
                "route(self.router(tokens), self.num_used,",
                "route(self.router(tokens), self.num_used - 1,",
            ),
        ),
    ),
    Property(
        "An expert that tokens of a forward go to is read once.",
        f"{EXPERTS}test_each_touched_expert_is_read_once",
        (
            Fault(
                "an expert counted for each token",
                SOURCE,
                "self.num_read += len(touched)",
                "self.num_read += chosen.numel()",
            ),
        ),
    ),
    Property(
        "Bytes are those of the experts that were read.",
        f"{EXPERTS}test_bytes_are_those_of_the_experts_that_were_read",
        (
            Fault(
                "all experts in each forward",
                "bench/roofline.py",
                "expert_total * counts.experts_read // num_experts",
                "expert_total * counts.num_forwards",
            ),
            Fault(
                "experts that are not counted",
                "runner/model_runner.py",
                "counts.experts_read += self.model.take_experts_read()",
                "self.model.take_experts_read()",
            ),
        ),
    ),
    Property(
        "A step of more tokens is expected to read more experts.",
        f"{EXPERTS}test_predicted_bytes_of_a_step_grow_with_its_tokens",
        (
            Fault(
                "as many experts as tokens use",
                "model/config.py",
                "self.num_experts * (1 - (1 - self.num_used / self.num_experts) ** num_tokens)",
                "float(min(self.num_experts, self.num_used * num_tokens))",
            ),
            Fault(
                "all experts in each step",
                "hardware/costs.py",
                "expert_total * (1 - c.experts.touched(B * T) / c.experts.num_experts)",
                "0",
            ),
        ),
    ),
    Property(
        "Before decoding, verifications of a mixture are timed with unlike drafts.",
        f"{EXPERTS}test_auto_gamma_times_the_experts_of_unlike_drafts",
        (
            Fault(
                "the tokens of a short draft in turn",
                "speculation/steps/calibration.py",
                "longest = few if steps.reads_experts else short",
                "longest = short",
            ),
            Fault(
                "a line from the shortest verification to the longest",
                "speculation/steps/calibration.py",
                "if steps.reads_experts else set()",
                "if False else set()",
            ),
        ),
    ),
    Property(
        "A forward is shown with the experts that it read, beside those by chance.",
        "test_latency.py::test_a_mixtures_forwards_are_shown_with_their_experts",
        (
            Fault(
                "experts of all layers",
                "bench/latency/forwards.py",
                "return counts.experts_read / num_layers if num_layers else None",
                "return float(counts.experts_read) if num_layers else None",
            ),
            Fault(
                "experts by chance of one row",
                "bench/latency/record.py",
                "experts.touched(tokens)",
                "experts.touched(cell.T)",
            ),
            Fault(
                "all experts in the bytes of a forward",
                "bench/roofline.py",
                "read = expert_total * counts.experts_read // num_experts if num_experts else 0",
                "read = expert_total",
            ),
        ),
    ),
)
