"""Small tokenizers of the kinds that reward models have, made without a download."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

TEMPLATE = (
    "{{ bos_token or '' }}{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{{ p['text'] if p['type'] == 'text' else '<|image|>' }}{% endfor %}{% endif %}"
    "<|end|>{% endfor %}"
)
MARKS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|image|>"]


def byte_level(template: str | None = TEMPLATE, *, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """As Llama's: any text, a first token that the tokenizer adds."""
    letters = sorted(ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<s>", "</s>", *MARKS, *letters])}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return _fast(tokenizer, template, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def words(template: str | None = TEMPLATE, *, known: int = 500) -> PreTrainedTokenizerFast:
    """As RoBERTa's: a first and a last token that the tokenizer adds. Knows w0, w1 and so on."""
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *MARKS, *(f"w{number}" for number in range(known))]
    tokenizer = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    pair = [("<s>", 0), ("</s>", 2)]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=pair)
    return _fast(tokenizer, template, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def slow(template: str | None = TEMPLATE) -> ByT5Tokenizer:
    """A tokenizer in Python, which doesn't tell where its tokens start."""
    tokenizer = ByT5Tokenizer(additional_special_tokens=MARKS, extra_ids=0)
    tokenizer.chat_template = template
    return tokenizer


def _fast(tokenizer: Tokenizer, template: str | None, **special: str) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=MARKS, **special)
    made.chat_template = template
    return made
