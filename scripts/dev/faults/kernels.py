"""Faults of how kernels are compiled."""

from __future__ import annotations

from faults.fault import Fault, Property

WRITTEN = "test_elementwise.py::test_sums_and_products_are_rounded_as_they_are_written"

PROPERTIES = (
    Property(
        "A source has the same bits wherever it is compiled.",
        f"{WRITTEN}[576]",
        (
            Fault(
                "products are joined with sums",
                "kernels/build.py",
                '"-ffp-contract=off"',
                '"-ffp-contract=fast"',
            ),
            Fault(
                "sums are regrouped",
                "kernels/build.py",
                '"-fno-signed-zeros",',
                '"-fno-signed-zeros", "-fassociative-math",',
            ),
        ),
    ),
)
