"""Tiny random reward models with tokenizers, and their scores by transformers alone."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    NystromformerConfig,
    NystromformerForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLNetConfig,
    XLNetForSequenceClassification,
)

VOCAB = 120
PAD, BOS, EOS, UNKNOWN = 0, 2, 3, 4
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} </s>{% endfor %}"


def llama(*, pad: int | None = PAD, labels: int = 1, positions: int = 256, **options: Any) -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        pad_token_id=pad,
        bos_token_id=BOS,
        eos_token_id=EOS,
        num_labels=labels,
        **options,
    )
    return _made(LlamaForSequenceClassification, config)


def gpt2() -> torch.nn.Module:
    """Has no pad token, as published."""
    config = GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, num_labels=1)
    config.bos_token_id = config.eos_token_id = EOS
    return _made(GPT2ForSequenceClassification, config)


def roberta() -> torch.nn.Module:
    """514 rows of positions, the first two of which are never a token's."""
    config = RobertaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=514,
        type_vocab_size=1,
        pad_token_id=1,
        num_labels=1,
    )
    return _made(RobertaForSequenceClassification, config)


_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def deberta() -> torch.nn.Module:
    """Its encoder reads the weights of a submodule, the relative positions, without calling it."""
    config = DebertaV2Config(
        **_SIZES,
        vocab_size=VOCAB,
        relative_attention=True,
        position_biased_input=False,
        pos_att_type=["p2c", "c2p"],
        max_relative_positions=32,
        position_buckets=16,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        num_labels=1,
        pad_token_id=0,
    )
    return _made(DebertaV2ForSequenceClassification, config)


def nystromformer() -> torch.nn.Module:
    """Its landmarks are means over all columns, padding too: a score moves by a few percent."""
    config = NystromformerConfig(
        **_SIZES, vocab_size=VOCAB, num_landmarks=8, segment_means_seq_len=8, num_labels=1, pad_token_id=0
    )
    return _made(NystromformerForSequenceClassification, config)


def xlnet() -> torch.nn.Module:
    """Scores the last column, whatever it holds."""
    config = XLNetConfig(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=48, num_labels=1, pad_token_id=5)
    return _made(XLNetForSequenceClassification, config)


def _made(cls: Any, config: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    model = cls(config).float().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4.0)  # random models are near constant: larger scores make a wrong position visible
    return model


def save(model: torch.nn.Module, folder: Any, *, bos: int = BOS) -> str:
    """Writes a checkpoint with a tokenizer that puts a bos token in front and knows the words w5, w6, ..."""
    model.save_pretrained(folder)
    words = {"<pad>": PAD, "<1>": 1, "<s>": bos, "</s>": EOS, "<unk>": UNKNOWN}
    words |= {f"w{index}": index for index in range(5, VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special).save_pretrained(folder)
    return str(folder)


def sequences(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Ids without special tokens, one list for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(6, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def text(ids: list[int]) -> str:
    """What the tokenizer makes bos and these ids of."""
    return " ".join(f"w{token}" for token in ids)


@torch.no_grad()
def alone(model: torch.nn.Module, ids: list[int]) -> list[float]:
    """Logits of one sequence, by the model itself."""
    tensor = torch.tensor([ids])
    return model(input_ids=tensor, attention_mask=torch.ones_like(tensor)).logits[0].tolist()
