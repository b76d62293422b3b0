"""Triton's interpreter without the work that it repeats.

Before each call of a function of `triton.language` that is itself written in Triton, such as
`tl.sum`, Triton 3.7 goes through all members of its language again and replaces those that the
launch has replaced already. That takes a quarter of the time of our kernels. Here the language is
replaced once in a launch.
"""

from typing import Any

NAMES = "_patch_lang", "_get_np_dtype", "GridExecutor", "_LangPatchScope"


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

    interpreter._patch_lang, interpreter._get_np_dtype = patch_language, numpy_dtype
    launch.__call__ = run
