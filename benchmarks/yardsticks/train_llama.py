"""Trains the second yardstick further: a Llama of 5.3 million parameters that recalls facts.

    python benchmarks/yardsticks/train_llama.py --model FOLDER --corpora FOLDER --output FOLDER

FOLDER of --model holds the model to start from, that of --corpora books_train.txt.xz and
books_eval/*.txt. Needs torch, numpy, safetensors and tokenizers. What has been reached is kept in
OUTPUT/state.pt every few minutes, and the same command goes on from there.

A document is either a stretch of the books, or one with facts in it that are asked for at its end.
Facts have the two wordings that the evaluation uses: "secret garden4821." (four digits) and
"The garden is window." (a word).
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import re
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

TOKENS_PER_STEP = 4096
LENGTHS = (512, 1024, 2048)
WARM_UP = 40  # steps
PEAK, LAST = 8e-4, 2e-5  # learning rates
FACTS = 0.5  # of the documents hold facts
WORDS = 0.65  # of the facts are words
WEIGHT = 4.0  # of a token that answers, against one of text
KEEP_EVERY, MEASURE_EVERY = 180.0, 600.0  # seconds of processor time


class Exercises:
    """Documents to train on, as token ids with a weight for each."""

    def __init__(self, tokenizer: Tokenizer, text: np.ndarray, seed: int) -> None:
        self.text = text
        self.random = np.random.default_rng(seed)
        names = {token: tokenizer.id_to_token(token) for token in range(300, 4096)}
        # With a space before it, and more than three letters.
        self.words = [i for i, name in names.items() if re.fullmatch("\u0120[A-Za-z]{4,}", name)]
        self.digits = [tokenizer.token_to_id(str(digit)) for digit in range(10)]
        self.pieces = {
            piece: tokenizer.encode(piece).ids for piece in ("\nsecret", "\nThe", " is", ".", "\n")
        }

    def stretch(self, length: int) -> np.ndarray:
        start = self.random.integers(len(self.text) - length)
        return self.text[start : start + length].astype(np.int64)

    def fact(self, key: int, word: bool) -> tuple[list[int], list[int]]:
        """What asks for a fact, and its answer."""
        if word:
            question = [*self.pieces["\nThe"], key, *self.pieces[" is"]]
            return question, [int(self.random.choice(self.words))]
        return [*self.pieces["\nsecret"], key], self.random.choice(self.digits, 4).tolist()

    def recall(
        self, length: int, kinds: list[bool], depth: float | None = None
    ) -> tuple[list[int], list[float]]:
        """A text with facts (``kinds``: whether each is a word) that are asked for at its end."""
        keys = self.random.choice(self.words, len(kinds), replace=False)
        facts = [self.fact(int(key), word) for key, word in zip(keys, kinds, strict=True)]
        dot, newline = self.pieces["."], self.pieces["\n"]
        stated = [question + answer + dot + newline for question, answer in facts]
        ids: list[int] = []
        weights: list[float] = []
        asked: list[int] = []
        for index in self.random.permutation(len(facts)):
            question, answer = facts[index]
            asked += question + answer + dot
            weights += [0.3] * len(question) + [WEIGHT] * len(answer) + [0.3] * len(dot)
        body = self.stretch(length - sum(map(len, stated)) - len(asked)).tolist()
        places = np.sort(self.random.integers(len(body), size=len(facts)))
        if depth is not None:
            places[:] = int(depth * len(body))
        last = 0
        for place, words in zip(places.tolist(), stated, strict=True):
            ids += body[last:place] + words
            last = place
        ids += body[last:]
        return ids + asked, [1.0] * len(ids) + weights

    def batch(self, length: int) -> tuple[Tensor, Tensor]:
        """Ids int64 [B, length + 1] and weights float32 [B, length] of what they predict."""
        documents, weights = [], []
        for _ in range(max(1, TOKENS_PER_STEP // length)):
            if self.random.random() < FACTS:
                count = int(self.random.integers(2, 2 + length // 100))
                kinds = (self.random.random(count) < WORDS).tolist()
                document, weight = self.recall(length + 1, kinds)
            else:
                document, weight = self.stretch(length + 1).tolist(), [1.0] * (length + 1)
            documents.append(document)
            weights.append(weight[1:])
        return torch.tensor(documents), torch.tensor(weights)


class Block(nn.Module):
    """A layer of Llama; the names of its weights are those of the published ones."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        width, self.head = sizes["hidden_size"], sizes["head_dim"]
        heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(width, heads * self.head),
                "k_proj": linear(width, kv_heads * self.head),
                "v_proj": linear(width, kv_heads * self.head),
                "o_proj": linear(heads * self.head, width),
            }
        )
        hidden = sizes["intermediate_size"]
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(width, hidden),
                "up_proj": linear(width, hidden),
                "down_proj": linear(hidden, width),
            }
        )
        self.input_layernorm = nn.RMSNorm(width, 1e-6)
        self.post_attention_layernorm = nn.RMSNorm(width, 1e-6)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.input_layernorm(x)

        def rows(name: str) -> Tensor:
            flat = self.self_attn[name](normed)
            return flat.view(batch, length, -1, self.head).transpose(1, 2)

        def rotated(x: Tensor) -> Tensor:
            one, two = x.float().chunk(2, -1)
            return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(x.dtype)

        queries, keys, values = rotated(rows("q_proj")), rotated(rows("k_proj")), rows("v_proj")
        group = queries.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.self_attn["o_proj"](mixed.transpose(1, 2).reshape(batch, length, -1))
        normed = self.post_attention_layernorm(x)
        gated = F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        return x + self.mlp["down_proj"](gated)


class Llama(nn.Module):
    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(width, 1e-6)
        half = config["head_dim"] // 2
        turns = config["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(LENGTHS[-1]), turns)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x) @ self.embed_tokens.weight.T


@torch.no_grad()
def measured(model: Llama, tokenizer: Tokenizer, held_out: np.ndarray) -> str:
    """Perplexity on books not trained on, and how many answers of two facts are right."""
    said = []
    with torch.autocast("cpu", torch.bfloat16):
        losses = []
        for start in range(0, len(held_out) - 1025, 16384):
            ids = torch.tensor(held_out[start : start + 1025].astype(np.int64))[None]
            losses.append(F.cross_entropy(model(ids[:, :-1])[0].float(), ids[0, 1:]).item())
        said.append(f"perplexity {math.exp(sum(losses) / len(losses)):.1f}")
        for length in (1024, 2048):
            for word in (True, False):
                exercises = Exercises(tokenizer, held_out, seed=7)
                shares = []
                for depth in (0.1, 0.5, 0.9):
                    right = asked = 0
                    for _ in range(6):
                        document, weights = exercises.recall(length, [word] * 2, depth)
                        ids = torch.tensor(document)[None]
                        answers = torch.tensor(weights)[1:] == WEIGHT
                        found = model(ids[:, :-1])[0].argmax(-1)
                        right += int((found == ids[0, 1:])[answers].sum())
                        asked += int(answers.sum())
                    shares.append(f"{right / asked:.2f}")
                said.append(f"{'words' if word else 'digits'} at {length} {'/'.join(shares)}")
    return ", ".join(said)


def tokens(tokenizer: Tokenizer, text: str) -> np.ndarray:
    text = re.sub(r"[ \t]+", " ", text)
    parts = [text[start : start + 1_000_000] for start in range(0, len(text), 1_000_000)]
    return np.array([i for part in parts for i in tokenizer.encode(part).ids], dtype=np.uint16)


def texts(arguments: argparse.Namespace, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """What is trained on, and what is held out."""
    kept = arguments.output / "tokens.npy"
    if not kept.exists():
        books = arguments.corpora / "books_train.txt.xz"
        with lzma.open(books, "rt", encoding="utf-8", errors="ignore") as file:
            np.save(kept, tokens(tokenizer, file.read()))
    held_out = [
        tokens(tokenizer, path.read_text("utf-8", errors="ignore"))[10_000:34_000]
        for path in sorted((arguments.corpora / "books_eval").glob("*.txt"))
    ]
    return np.load(kept), np.concatenate(held_out)


def export(model: Llama, source: Path, output: Path) -> None:
    """A folder that mlx_lm loads; weights in float16."""
    weights = {
        f"model.{name}": value.detach().to(torch.float16).contiguous()
        for name, value in model.named_parameters()
    }
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, output / name)
    config = json.loads((source / "config.json").read_text())
    config |= {"torch_dtype": "float16", "max_position_embeddings": LENGTHS[-1]}
    (output / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=120, help="of processor time in all")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)

    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    train, held_out = texts(arguments, tokenizer)
    model = Llama(json.loads((arguments.model / "config.json").read_text()))
    weights = load_file(arguments.model / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): each for name, each in weights.items()})
    matrices = [each for each in model.parameters() if each.dim() == 2]
    vectors = [each for each in model.parameters() if each.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), fused=True)

    step, used = 0, 0.0
    state = arguments.output / "state.pt"
    if state.exists():
        found = torch.load(state)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step, used = found["step"], found["used"]
    exercises = Exercises(tokenizer, train, seed=step)
    limit, began = arguments.minutes * 60, time.process_time() - used
    kept = measured_at = used
    while (used := time.process_time() - began) < limit:
        done = used / limit
        rate = LAST + (PEAK - LAST) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / WARM_UP)
        ids, weight = exercises.batch(int(exercises.random.choice(LENGTHS)))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids[:, :-1])
        each = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (each * weight.flatten()).sum() / weight.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 10 == 0:
            print(f"step {step}, {used / 60:.1f} minutes, loss {loss.item():.3f}", flush=True)
        if used - kept > KEEP_EVERY:
            kept = used
            said = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(said | {"step": step, "used": used}, state)
        if used - measured_at > MEASURE_EVERY:
            measured_at = used
            print(measured(model, tokenizer, held_out), flush=True)
    print(measured(model, tokenizer, held_out), flush=True)
    export(model, arguments.model, arguments.output)


if __name__ == "__main__":
    main()
