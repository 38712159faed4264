"""Metadata of verl-ext-sharding. Installing it alone never moves torch, ray, vllm, transformers or verl."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "verl_ext_sharding/versions.py").read_text(), re.M).group(1)

VERL = "verl>=0.9,<0.10"
# What verl's v1 trainer imports beyond verl's own requirements.
VERL_V1 = ["TransferQueue>=0.1.10", "pyzmq", "msgspec", "cachetools", "uvicorn", "fastapi"]

setup(
    name="verl-ext-sharding",
    version=VERSION,
    description="Each model of a verl job on its own devices, planned before launch: add trainer.plugin=sharding",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author="The verl-ext-sharding authors",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["verl_ext_sharding", "verl_ext_sharding.*"]),
    package_data={"verl_ext_sharding.config": ["group/sharding/*.yaml"]},
    install_requires=["wrapt>=1.16,<3", "rich>=13"],
    extras_require={
        "verl": [VERL, *VERL_V1],
        "flash": ["flash-attn>=2.8"],
        # On Linux, PyPI's torch is a CUDA build; PyTorch's CPU index has a smaller one, which satisfies this as well.
        "cpu": [VERL, *VERL_V1, "torch>=2.10,<=2.13.0"],
        "test": ["filelock", "pytest>=8", "pytest-xdist>=3.6", "ruff>=0.15", "mypy>=1.15", "types-PyYAML"],
    },
    entry_points={
        "verl.plugins": ["sharding = verl_ext_sharding.plugin"],
        "console_scripts": ["verl-sharding = verl_ext_sharding.cli.main:main"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
