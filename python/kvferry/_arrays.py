# SPDX-License-Identifier: Apache-2.0
"""Arrays of numpy, torch and the buffer protocol as memory that the C core can use, and back.

Neither numpy nor torch is imported before an array of theirs was seen, or is asked for.
"""

from __future__ import annotations

import array
import importlib
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from ._kvferry import Part

Kind: TypeAlias = Literal["numpy", "torch", "bytes"]
"""What a loaded array is: a numpy.ndarray, a torch.Tensor, or a memoryview of bytes."""
KINDS: tuple[Kind, ...] = ("numpy", "torch", "bytes")

MAX_DTYPE = 15
"""The longest name of a dtype that a session keeps."""

# Formats of the buffer protocol, by kind and size, because "l" has 4 or 8 bytes.
_FORMATS = {"f": "float", "i": "int", "u": "uint"}
_KIND_OF = dict.fromkeys("efd", "f") | dict.fromkeys("bhilqn", "i") | dict.fromkeys("BHILQN", "u")


class Memory(NamedTuple):
    """The memory of an array in C order."""

    part: Part
    """A buffer, or (address, nbytes)."""
    nbytes: int
    dtype: str | None
    """numpy's name, such as "float16" or "bfloat16"; None: bytes, of which nothing more is known."""
    shape: tuple[int, ...] | None
    owner: object
    """Keeps the memory alive. It is the array itself, or a copy of one that was not contiguous."""


def is_array(x: object) -> bool:
    """Whether `memory_of` may know it: an array, a tensor, a buffer; not a sequence of them."""
    return not isinstance(x, (list, tuple, str)) and (
        _is(x, "numpy", "ndarray") or _is(x, "torch", "Tensor") or _has_buffer(x) or hasattr(x, "__array__")
    )


def memory_of(x: Any, name: str, *, writable: bool = False) -> Memory:
    """The memory of an array, without a copy if it is contiguous and on the CPU. `name` is for messages.

    writable: the memory is to be written to, so a copy is no use. Raises TypeError where that, or the kind of array,
    is impossible, and says what to do.
    """
    if _is(x, "torch", "Tensor"):
        return _of_torch(x, name, writable)
    if _is(x, "numpy", "ndarray"):
        return _of_numpy(x, name, writable)
    if _has_buffer(x):
        return _of_buffer(x, name, writable)
    if hasattr(x, "__array__") and not writable:
        return _of_numpy(importlib.import_module("numpy").asarray(x), name, writable)
    wanted = "writable array" if writable else "numpy array, a torch tensor or a buffer"
    raise TypeError(f"{name} must be a {wanted}, not {type(x).__name__}")


def array_from(buffer: memoryview, dtype: str | None, shape: Sequence[int] | None, kind: Kind) -> Any:
    """An array over a writable buffer of bytes, without a copy. Where dtype or shape is unknown it is the buffer.

    Raises TypeError: the dtype is not known to that library.
    """
    if kind == "bytes" or dtype is None or shape is None:
        return buffer
    shape = tuple(shape)
    if kind == "torch":
        torch = importlib.import_module("torch")
        like = _torch_dtype(torch, dtype)
        return torch.frombuffer(buffer, dtype=like).reshape(shape) if buffer.nbytes else torch.empty(shape, dtype=like)
    numpy = importlib.import_module("numpy")
    like = _numpy_dtype(numpy, dtype)
    return numpy.frombuffer(buffer, like).reshape(shape) if buffer.nbytes else numpy.empty(shape, like)


# ---- numpy


def _of_numpy(x: Any, name: str, writable: bool) -> Memory:
    dtype = x.dtype
    if dtype.hasobject or dtype.names is not None or dtype.kind in "SUMm":
        raise TypeError(f"{name} has dtype {dtype}, which is no plain number: pass its bytes, {name}.view('uint8')")
    if not dtype.isnative:
        _refuse_copy(name, writable, f"has dtype {dtype}, of the other byte order", ".astype(dtype.newbyteorder('='))")
        x = x.astype(dtype.newbyteorder("="))
    if not x.flags.c_contiguous:
        _refuse_copy(name, writable, "is not contiguous in C order", ".copy()")
        x = x.copy(order="C")
    if writable and not x.flags.writeable:
        raise TypeError(f"{name} is read-only: pass an array that may be written to")
    address = x.__array_interface__["data"][0]
    return Memory((address, x.nbytes), x.nbytes, _checked(dtype.name, name), tuple(x.shape), x)


def _numpy_dtype(numpy: Any, name: str) -> Any:
    try:
        return numpy.dtype(name)
    except TypeError:
        pass
    try:
        return numpy.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except ImportError:
        hint = f"numpy knows {name} only with ml_dtypes: pip install ml_dtypes, or load with arrays='torch' or 'bytes'"
    except (AttributeError, TypeError):
        hint = f"neither numpy nor ml_dtypes knows the dtype {name}: load with arrays='bytes'"
    raise TypeError(hint)


# ---- torch


def _of_torch(x: Any, name: str, writable: bool) -> Memory:
    torch = sys.modules["torch"]
    if x.layout is not torch.strided or x.is_quantized:
        raise TypeError(f"{name} is a sparse or quantised tensor: pass its dense parts, or {name}.dequantize()")
    dtype = _checked(str(x.dtype).removeprefix("torch."), name)
    x = x.detach()
    if x.device.type != "cpu":
        _refuse_copy(name, writable, f"is on {x.device}", ".cpu()")
        x = x.cpu()
    if x.is_conj() or x.is_neg():
        _refuse_copy(name, writable, "is a lazy conjugate or negative", ".resolve_conj().resolve_neg()")
        x = x.resolve_conj().resolve_neg()
    if not x.is_contiguous():
        _refuse_copy(name, writable, "is not contiguous", ".contiguous()")
        x = x.contiguous()
    nbytes = x.numel() * x.element_size()
    return Memory((x.data_ptr(), nbytes), nbytes, dtype, tuple(x.shape), x)


def _torch_dtype(torch: Any, name: str) -> Any:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"this torch ({torch.__version__}) does not know the dtype {name}: load with arrays='bytes'")
    return dtype


# ---- the buffer protocol


def _of_buffer(x: Any, name: str, writable: bool) -> Memory:
    view = memoryview(x)
    dtype = shape = None
    # Bytes are bytes: a plain client passes tobytes(), and gets bytes back.
    if view.format not in ("B", "c") or view.ndim != 1 or isinstance(x, array.array):
        dtype, shape = _dtype_of_format(view, name), view.shape
    if not view.c_contiguous:
        _refuse_copy(name, writable, "is not contiguous in C order", " as bytes")
        view = memoryview(view.tobytes())
    if writable and view.readonly:
        raise TypeError(f"{name} is read-only: pass a buffer that may be written to")
    return Memory(view, view.nbytes, dtype, shape, x)


def _dtype_of_format(view: memoryview, name: str) -> str:
    code = view.format.lstrip("@=")
    if code == "?":
        return "bool"
    if code in _KIND_OF and struct.calcsize(code if code in "nN" else view.format) == view.itemsize:
        return f"{_FORMATS[_KIND_OF[code]]}{8 * view.itemsize}"
    raise TypeError(f"{name} is a buffer of the format {view.format!r}: pass its bytes, memoryview(x).cast('B')")


# ---- all of them


def _is(x: object, module: str, kind: str) -> bool:
    """Whether it is an instance of a class of a module that someone has imported."""
    cls = getattr(sys.modules.get(module), kind, None)
    return cls is not None and isinstance(x, cls)


def _has_buffer(x: object) -> bool:
    try:
        memoryview(x)  # type: ignore[arg-type]
    except (TypeError, BufferError, ValueError):
        return False
    return True


def _refuse_copy(name: str, writable: bool, what: str, how: str) -> None:
    if writable:
        raise TypeError(f"{name} {what}, so nothing can be read straight into it: load into {name}{how} and copy back")


def _checked(dtype: str, name: str) -> str:
    if len(dtype) > MAX_DTYPE or not dtype.replace("_", "").isalnum():
        raise TypeError(
            f"{name} has dtype {dtype}; a session keeps names of up to {MAX_DTYPE} letters: pass it as uint8 "
            f"(numpy: {name}.view('uint8'), torch: {name}.view(torch.uint8))"
        )
    return dtype
