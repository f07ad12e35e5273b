"""Buffers that end at a guard page, filled with a poison that shows up when it is read."""

import ctypes
import mmap

import mlx.core as mx
import numpy as np

POISON = 0xFF  # NaN in every float format, -1 in every integer one

NAMES = ("float32", "float16", "bool_", "int32", "int64", "uint8", "uint32")
# bfloat16 travels as its bits.
NUMPY = {getattr(mx, name): np.dtype(getattr(np, name)) for name in NAMES}
NUMPY |= {mx.bfloat16: np.dtype(np.uint16)}

_libc = ctypes.CDLL(None, use_errno=True)


class GuardedBuffer:
    """Bytes between two pages without access, poisoned.

    The end touches the page behind, so that the first byte too far faults; what is left in
    front, within the first page, is compared by ``intact``.
    """

    def __init__(self, nbytes: int) -> None:
        page = mmap.PAGESIZE
        inner = max(1, -(-nbytes // page)) * page
        self._map = mmap.mmap(-1, inner + 2 * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for guard in (base, base + page + inner):
            if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self._front = np.frombuffer(self._map, np.uint8, inner - nbytes, page)
        self.bytes = np.frombuffer(self._map, np.uint8, nbytes, page + inner - nbytes)
        self._front[:] = POISON
        self.bytes[:] = POISON
        self.address = base + page + inner - nbytes

    def intact(self) -> bool:
        """Whether nothing in front of the buffer was written."""
        return bool((self._front == POISON).all())


class InputBuffer:
    """A copy of an array with the strides that MLX would pass, poison in between."""

    def __init__(self, array: mx.array) -> None:
        # The array's own memory, strides included.
        source = np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
        size = source.itemsize
        self.shape = source.shape
        self.strides = tuple(stride // size for stride in source.strides)
        steps = [(length - 1) * s for length, s in zip(source.shape, self.strides, strict=True)]
        lowest = sum(step for step in steps if step < 0)
        span = sum(abs(step) for step in steps) + 1
        self._buffer = GuardedBuffer(span * size)
        self.address = self._buffer.address - lowest * size
        elements = self._buffer.bytes.view(source.dtype)
        np.lib.stride_tricks.as_strided(elements[-lowest:], source.shape, source.strides)[...] = (
            source
        )
        self._before = self._buffer.bytes.copy()
        # For a count of what is read: a byte for each byte, and where element 0 has its own.
        self.seen = np.zeros(span * size, np.uint8)
        self.seen_address = int(self.seen.ctypes.data) - lowest * size

    def intact(self) -> bool:
        """Whether the kernel has left the input as it was."""
        return self._buffer.intact() and np.array_equal(self._buffer.bytes, self._before)


class OutputBuffer:
    """Memory for an output; the kernel must write all of it, the poison says where it did not."""

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        self._shape, self._dtype = shape, dtype
        self._buffer = GuardedBuffer(int(np.prod(shape)) * NUMPY[dtype].itemsize)
        self.address = self._buffer.address

    def intact(self) -> bool:
        """Whether nothing in front of the output was written."""
        return self._buffer.intact()

    def array(self) -> mx.array:
        """A copy of what the kernel wrote."""
        values = mx.array(self._buffer.bytes.view(NUMPY[self._dtype]).reshape(self._shape))
        return values.view(mx.bfloat16) if self._dtype == mx.bfloat16 else values
