"""A process whose memory runs out: generations with the named policies, in which the allocation of
one array or another fails. Prints how many arrays there were; status 0 if all went as it should.

Loaded behind failing_malloc.c."""

import ctypes
import sys

import mlx.core as mx

import mlx_h2o
from routing_checks import everything_of_mlx_lm
from tiny_models import random_prompt, tiny_qwen3, tiny_tokenizer

memory = ctypes.CDLL(None)
memory.fail_at.argtypes = [ctypes.c_long]
memory.arrays_asked.restype = ctypes.c_long
mx.set_cache_limit(0)  # else arrays get what others had
model, tokenizer = tiny_qwen3(), tiny_tokenizer()
before = everything_of_mlx_lm()


def write(policy: str) -> str:
    settings = {"max_kv_size": 16, "policy": policy}
    return mlx_h2o.generate(model, tokenizer, random_prompt(20), max_tokens=2, **settings)


for policy in sys.argv[1:]:
    expected = write(policy)
    memory.fail_at(1 << 30)
    assert write(policy) == expected
    arrays = memory.arrays_asked()
    print(policy, arrays, flush=True)
    for number in range(1, arrays + 1, max(1, arrays // 3)):
        memory.fail_at(number)
        try:
            write(policy)
        except RuntimeError as error:
            if "[mlx_h2o] there is no memory for an array of " not in str(error):
                raise
        else:
            raise SystemExit(f"{policy}: array {number} of {arrays} was not missed")
        memory.fail_at(0)
        assert everything_of_mlx_lm() == before
    assert write(policy) == expected
