"""What is read from a modeling file: forms of handing positions on that are understood, and that all others count as none."""

from __future__ import annotations

import importlib.util
import sys
import textwrap

import pytest

from verl_ext_sharding.training.modeling_source import MASK_BUILDERS, ModelingSource

FILE = """
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

BUILDERS = {{"full_attention": create_causal_mask}}

class Model(PreTrainedModel):
    def _init_weights(self, module):
        return isinstance(module, Tower)

    def create_masks_for_generate(self, mask):
        return create_causal_mask(mask)

    def forward(self, x, mask, position_ids, **kwargs):
{body}

class Tower(PreTrainedModel):
    def forward(self, mask):
        return create_causal_mask(mask)
"""
CALL = "return create_causal_mask"
HANDED_ON = {
    "keyword": f"{CALL}(mask, position_ids=position_ids)",
    "literal": f"options = {{'position_ids': position_ids}}\n{CALL}(**options)",
    "copy": f"first = {{'position_ids': position_ids}}\nsecond = first.copy()\nsecond['x'] = x\n{CALL}(**second)",
    "unpacked": f"first = dict(position_ids=position_ids)\nsecond = {{**first, 'x': x}}\n{CALL}(**second)",
    "alias": (
        "build = create_causal_mask if x else create_sliding_window_causal_mask\n"
        "return build(mask, position_ids=position_ids)"
    ),
}
NOT_HANDED_ON = {
    "nothing": f"{CALL}(mask)",
    "none": f"{CALL}(mask, position_ids=None)",
    "literal": f"options = {{'mask': mask}}\n{CALL}(**options)",
    "one branch": f"options = {{'position_ids': position_ids}}\nif x:\n    options = {{}}\n{CALL}(**options)",
    "caller's": f"{CALL}(mask, **kwargs)",
    "alias": "build = create_causal_mask if x else create_sliding_window_causal_mask\nreturn build(mask)",
    "table": "return BUILDERS['full_attention'](mask, position_ids=position_ids)",
    "argument": "return x(create_causal_mask, position_ids=position_ids)",
}


@pytest.fixture
def source_of(tmp_path, monkeypatch):
    """Reads the model of a modeling file with the given body of `forward`."""

    def build(body):
        path = tmp_path / "modeling_made_up.py"
        path.write_text(FILE.format(body=textwrap.indent(body, " " * 8)))
        spec = importlib.util.spec_from_file_location(f"modeling_made_up_{abs(hash(body))}", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return ModelingSource(module.Model)

    return build


@pytest.mark.parametrize("form", HANDED_ON)
def test_positions_are_seen_in_each_form_that_transformers_uses(form, source_of):
    assert source_of(HANDED_ON[form]).mask_calls() == [True]


@pytest.mark.parametrize("form", NOT_HANDED_ON)
def test_positions_that_cannot_be_seen_count_as_not_handed_on(form, source_of):
    assert source_of(NOT_HANDED_ON[form]).mask_calls() == [False]


def test_the_installed_transformers_has_the_builders_that_models_use():
    assert {"create_causal_mask", "create_sliding_window_causal_mask"} <= MASK_BUILDERS
    assert "create_bidirectional_mask" not in MASK_BUILDERS
