"""Triton's interpreter, the same results in a fraction of the time: what it works out at every operation is kept.

Of a kernel's time in the interpreter of Triton 3.6 arithmetic is a few percent. The rest is done anew for every
operation: a third of it checks integers for overflow and drops the answer (its assertions are off), a fifth looks up
all members of triton.language at every call of a device function, the rest is types of tensors and of tuples. Here each
of those is done once. Other versions of Triton are left as they are.
"""

import inspect
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def hasten() -> None:
    """Change the interpreter of this process, once."""
    if not triton.__version__.startswith("3.6."):
        return
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    assert not builder.options.debug, "with assertions on, checks of overflow mean something"
    builder.options = replace(builder.options, sanitize_overflow=False)

    # (1) dtypes of numpy, by name
    slow_dtype, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def np_dtype(x: Any) -> Any:
        found = dtypes.get(x.name)
        if found is None:
            found = dtypes[x.name] = slow_dtype(x)
        return found

    interpreter._get_np_dtype = np_dtype

    # (2) types of blocks by element and shape, with the sizes of their tensors (tuples with types of their own)
    slow_block, blocks, single = core.block_type.__init__, dict[Any, Any](), (core.constexpr(1), core.tuple([]))
    shapes: dict[Any, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(s.value if type(s) is core.constexpr else s for s in shape)
        found = blocks.get((element_ty.name, sizes))
        if found is None:
            slow_block(self, element_ty, shape)
            if sizes not in shapes:
                of_tensor = core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(s) for s in sizes])
                shapes[sizes] = self.shape, self.numel, of_tensor
            found = blocks[element_ty.name, sizes] = (*shapes[sizes], self.name)
        self.element_ty = element_ty
        self.shape, self.numel, self.of_tensor, self.name = found

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensor if type.is_block() else single

    core.block_type.__init__ = block
    core.tensor.__init__ = tensor

    # (3) tensors of one shape, which is one object now
    slow_broadcast = interpreter.TritonSemantic.broadcast_impl_value

    def broadcast(self: Any, a: Any, b: Any) -> Any:
        same = a.type.is_block() and b.type.is_block() and a.type.shape is b.type.shape
        return (a, b) if same else slow_broadcast(self, a, b)

    interpreter.TritonSemantic.broadcast_impl_value = broadcast

    # (4) constants that are none
    slow_unwrap = core._unwrap_if_constexpr

    def unwrap(x: Any) -> Any:
        return x if type(x) in (int, core.tensor, core.dtype) else slow_unwrap(x)

    core._unwrap_if_constexpr = tl._unwrap_if_constexpr = unwrap

    # (5) triton.language, changed once and for good
    def member(owner: Any, name: str, of: Any, builder: Any, scope: Any) -> None:
        inner = inspect.unwrap(of)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = member
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
