"""Builds a tiny model, a byte-level tokenizer and an arithmetic data set: nothing is downloaded.

Real architectures with random weights: everything that runs on them runs on a model of any size.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import os
import random
import shutil
import string
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_FORMAT = 2
"""Raised when the same shape is built into other files."""

_REWARD = '''"""Rule reward of the demo: letters and digits are worth something, the right sum more."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    readable = sum(char.isalnum() for char in solution_str) / max(1, len(solution_str))
    return {"score": readable + float(ground_truth in solution_str), "readable": readable}
'''

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(kw_only=True, frozen=True)
class TinyModel:
    """Shape of the model.

    `vocab_size` None: the 256 bytes and the special tokens, padded to a multiple of 64. A number, 259 or more: the tokenizer
    has words for all further ids too, since verl's servers sample none that the tokenizer lacks, while the trained model's
    log-probs are over all of them.
    """

    architecture: str = "qwen2"
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 128
    tied: bool = False
    vocab_size: int | None = None
    seed: int = 0


@dataclass(kw_only=True, frozen=True)
class Assets:
    """Where the demo's files lie."""

    model: Path
    critic: Path
    train_files: Path
    val_files: Path
    reward: Path


def cache_root() -> Path:
    """Folder for generated files: `$XDG_CACHE_HOME/verl-ext-sharding`, or the same under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.abspath(os.path.expanduser(base))) / "verl-ext-sharding"


def build(model: TinyModel | None = None, root: Path | None = None) -> Assets:
    """Builds the files once and returns where they are; a second call with the same shape finds them.

    Args:
        model: Shape of the model; None: the demo's.
        root: Folder to build in; None: the cache folder.
    """
    model = model or TinyModel()
    content = json.dumps([_FORMAT, asdict(model), _REWARD, _CHAT_TEMPLATE], sort_keys=True)
    home = (root or cache_root()) / f"{model.architecture}-{hashlib.sha256(content.encode()).hexdigest()[:10]}"
    if not (home / "complete").exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=home.parent, prefix=".building-"))
        try:
            _write_models(building, model)
            _write_data(building)
            (building / "reward.py").write_text(_REWARD)
            (building / "complete").touch()
            try:
                building.rename(home)
            except OSError:
                if not (home / "complete").exists():  # else another process was faster
                    raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return Assets(
        model=home / "model",
        critic=home / "critic",
        train_files=home / "train.parquet",
        val_files=home / "val.parquet",
        reward=home / "reward.py",
    )


def _write_models(folder: Path, model: TinyModel) -> None:
    """Writes the policy, and the critic with a value head of its own, so that runs start from equal weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    tokenizer = _tokenizer(model.vocab_size)
    config = AutoConfig.for_model(
        model.architecture,
        vocab_size=model.vocab_size or (len(tokenizer) + 63) // 64 * 64,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=model.tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(model.seed)
        policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        critic = AutoModelForTokenClassification.from_config(_with_one_label(config), dtype=torch.float32)
        critic.base_model.load_state_dict(policy.base_model.state_dict())
    with _without_progress_bars():
        for name, part in (("model", policy), ("critic", critic)):
            part.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """A bar for a model of 200 kB says nothing."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _with_one_label(config: Any) -> Any:
    """A config for a model with one value per token."""
    config = copy.deepcopy(config)
    config.num_labels = 1
    return config


def _tokenizer(vocab_size: int | None = None) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(_SPECIAL), special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["0"], trainer)
    if vocab_size is not None:
        vocab = core.get_vocab()
        if vocab_size < len(vocab):
            raise ValueError(f"vocab_size is {vocab_size}, and bytes and special tokens alone are {len(vocab)}")
        words = itertools.islice(_words(), vocab_size - len(vocab))
        core.model = models.BPE(vocab=vocab | {word: len(vocab) + i for i, word in enumerate(words)}, merges=[])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _words() -> Iterator[str]:
    """Tokens that text is never cut into, for there are no merges: four letters and four signs by turns, so that the rule reward varies."""
    signs = str.maketrans(string.ascii_lowercase, string.punctuation[:26])
    for letters in itertools.product(string.ascii_lowercase, repeat=4):
        word = "".join(letters)
        yield word
        yield word.translate(signs)


def _write_data(folder: Path) -> None:
    import pandas as pd

    numbers = random.Random(0)
    rows = []
    for index in range(256):
        left, right = numbers.randint(0, 9), numbers.randint(0, 9)
        rows.append(
            {
                "data_source": "tiny/add",
                "prompt": [{"role": "user", "content": f"{left}+{right}="}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(left + right)},
                "extra_info": {"split": "train", "index": index},
            }
        )
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    pd.DataFrame(rows[:8]).to_parquet(folder / "val.parquet")
