"""A process whose memory runs out in calls of the C interface: the allocation of each array fails
in turn, and the call must report it. Loaded behind failing_malloc.c."""

import ctypes

import mlx.core as mx
import numpy as np

import c_api

memory = ctypes.CDLL(None)
memory.fail_at.argtypes = [ctypes.c_long]
memory.arrays_asked.restype = ctypes.c_long
mx.set_cache_limit(0)  # else arrays get what others had
library = c_api.required()
rows = np.random.default_rng(3).standard_normal((1, 2, 300, 64)).astype(np.float32)
arrays = [library.array(part) for part in (rows[:, :, :4], rows, rows)]


def attend() -> np.ndarray:
    return library.numpy(library.attention(*arrays, scale=0.125)["out"])


expected = attend()
memory.fail_at(1 << 30)
attend()
count = memory.arrays_asked()
print("arrays", count, flush=True)
for number in range(1, count + 1):
    memory.fail_at(number)
    try:
        attend()
    except c_api.CError as error:
        if "there is no memory for an array of" not in str(error):
            raise
    else:
        raise SystemExit(f"array {number} of {count} was not missed")
    memory.fail_at(0)
    np.testing.assert_array_equal(attend(), expected)
