"""Triton's interpreter without the work that it repeats.

Before each call of a function of `triton.language` that is itself written in Triton, such as
`tl.sum`, Triton 3.7 goes through all members of its language again and replaces those that the
launch has replaced already. That takes a quarter of the time of our kernels. Here the language is
replaced once in a launch.

Another fifth of the time goes to the overflow of sums and products of integers, which are computed
once more with more bits: for an assertion that is made with the option `debug` alone, which is off.
And the type and the shape of each result are made anew, though a kernel has few of them.
"""

from dataclasses import replace
from math import prod
from typing import Any

NAMES = "_patch_lang", "_get_np_dtype", "GridExecutor", "_LangPatchScope", "interpreter_builder"


def patch_once() -> None:
    """From now on, in this process, however often it is called. Another version of Triton, without
    these functions, stays as it is."""
    from triton import language as tl
    from triton.runtime import interpreter

    if any(not hasattr(interpreter, name) for name in NAMES):
        return
    if interpreter._patch_lang.__module__ == __name__:
        return
    patch, dtype_of, launch = (getattr(interpreter, name) for name in NAMES[:3])
    start = launch.__call__
    inside: list[set[int]] = []  # for each launch that is running, the modules replaced within it
    dtypes: dict[str, Any] = {}

    def patch_language(function: Any) -> Any:
        modules = {id(m) for m in function.__globals__.values() if m is tl or m is tl.core}
        if inside and modules <= inside[-1]:
            return interpreter._LangPatchScope()
        if inside:
            inside[-1] |= modules
        return patch(function)

    def run(grid: Any, *args: Any, **options: Any) -> Any:
        inside.append(set())
        try:
            return start(grid, *args, **options)
        finally:
            inside.pop()

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        found = dtypes.get(scalar.name)
        if found is None:
            found = dtypes[scalar.name] = dtype_of(scalar)
        return found

    interpreter._patch_lang = patch_language
    interpreter._get_np_dtype = numpy_dtype
    launch.__call__ = run
    leave_overflow(interpreter.interpreter_builder)
    keep_types(tl.core)


def leave_overflow(builder: Any) -> None:
    """The interpreter asserts nothing about it unless it debugs."""
    if getattr(builder.options, "sanitize_overflow", False) and not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def keep_types(core: Any) -> None:
    """Types of blocks and shapes of tensors are made once. Nothing changes them."""
    begin = core.tensor.__mro__[1].__init__
    make_block = core.block_type.__init__
    with_element = core.block_type.with_element_ty
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}

    def block_type(self: Any, element: Any, shape: Any) -> None:
        sizes = [s.value if isinstance(s, core.constexpr) else s for s in shape]
        key = element.__class__, element.name, *sizes
        if key in blocks:
            self.__dict__ = blocks[key]
        else:
            make_block(self, element, shape)
            blocks[key] = vars(self)

    def with_element_type(self: Any, scalar: Any) -> Any:
        known = vars(self).setdefault("known", {})
        key = scalar.__class__, scalar.name
        if key not in known:
            known[key] = with_element(self, scalar)
        return known[key]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        begin(self)
        if "sizes" not in vars(type):
            shape = list(type.shape) if type.is_block() else []
            type.sizes = core.constexpr(prod(shape)), core.tuple([*map(core.constexpr, shape)])
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.numel, self.shape = type.sizes

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    core.block_type.with_element_ty = with_element_type
