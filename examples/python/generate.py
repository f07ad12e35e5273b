"""Generate with a bounded cache: a fact is planted, read past, and asked for."""

import mlx_h2o
from mlx_h2o import demo

model, tokenizer = mlx_h2o.load("demo")  # or a directory, or a name on the hub
cache = mlx_h2o.make_prompt_cache(model, max_kv_size=128)
prompt = "\nsecret garden4821.\n" + demo.text()[:1500] + "\nsecret garden"
answer = mlx_h2o.generate(model, tokenizer, prompt, max_tokens=4, prompt_cache=cache)
print(answer, "from", cache[0].size(), "of", cache[0].offset, "rows")
