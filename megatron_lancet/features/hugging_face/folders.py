"""Writes Hugging Face folders, which are complete whenever they have their name."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lancet.errors import CheckpointError, UsageError
from megatron_lancet.features.hugging_face.flags import SAVE
from megatron_lancet.features.hugging_face.source import CONFIG, Source
from megatron_lancet.features.hugging_face.weights import expected_names, stream
from megatron_lancet.runtime.collectives import from_rank_0

INCOMPLETE = "incomplete_"
_SHARD_BYTES = 5 * 10**9
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


def check_writable(folder: Path) -> None:
    """
    Raises:
        UsageError: no folder can be made there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Ranks in other containers may have the same process number.
        Path(tempfile.mkdtemp(dir=folder, prefix=f"{INCOMPLETE}probe_")).rmdir()
    except OSError as error:
        raise UsageError(f"{SAVE} {folder}: expected a folder that can be written, found {error}.") from error


def save(source: Source, stages: Sequence[torch.nn.Module], target: Path) -> None:
    """Writes the model. Rank 0 writes and all ranks send their weights: collective over all ranks.

    Raises:
        CheckpointError: it could not be written; ``target`` is as before.
    """
    tensors = stream(source, stages)
    problem = _write(source, tensors, target) if dist.get_rank() == 0 else None
    for _ in tensors:  # of other ranks all; of rank 0 the rest behind an error, which the others send
        pass
    problem = from_rank_0(lambda: problem)
    if problem is not None:
        raise CheckpointError(f"{SAVE}: {target} could not be written: {problem}. The training's checkpoints stay.")


def _write(source: Source, tensors: Iterator[tuple[str, torch.Tensor]], target: Path) -> str | None:
    """Returns what went wrong, None if nothing did."""
    from safetensors import SafetensorError

    temporary = target.with_name(INCOMPLETE + target.name)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        shards = _Shards(temporary)
        for name, tensor in tensors:
            shards.add(name, tensor)
        shards.finish()
        lost = sorted(expected_names(source) - shards.names())
        if lost:
            return f"Bridge did not export {', '.join(lost[:3])}"
        _copy_rest(source, temporary, shards.dtype)
        _publish(temporary, target)
    except (OSError, SafetensorError) as error:
        return str(error)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return None


class _Shards:
    """Tensors on their way into files of a bounded size.

    Attributes:
        dtype: of the first tensor, the embeddings, as Hugging Face spells it.
    """

    def __init__(self, folder: Path) -> None:
        self.dtype = ""
        self._folder = folder
        self._waiting: dict[str, torch.Tensor] = {}
        self._num_bytes = 0
        self._total_bytes = 0
        self._written: list[Sequence[str]] = []

    def names(self) -> set[str]:
        """Names of all tensors."""
        return {name for shard in self._written for name in shard}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a tensor, and writes a file when one is full."""
        self.dtype = self.dtype or str(tensor.dtype).removeprefix("torch.")
        num_bytes = tensor.numel() * tensor.element_size()
        if self._waiting and self._num_bytes + num_bytes > _SHARD_BYTES:
            self._write()
        self._waiting[name] = tensor.contiguous()
        self._num_bytes += num_bytes

    def finish(self) -> None:
        """Writes the last file, and the index of several."""
        self._write()
        total = len(self._written)
        if total == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return
        files = [f"model-{number + 1:05}-of-{total:05}.safetensors" for number in range(total)]
        for number, file in enumerate(files):
            self._part(number).rename(self._folder / file)
        weight_map = {name: file for file, names in zip(files, self._written, strict=True) for name in names}
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"

    def _write(self) -> None:
        from safetensors.torch import save_file

        save_file(self._waiting, self._part(len(self._written)), metadata={"format": "pt"})
        self._written.append(tuple(self._waiting))
        self._total_bytes += self._num_bytes
        self._waiting, self._num_bytes = {}, 0


def _copy_rest(source: Source, folder: Path, dtype: str) -> None:
    """Copies configuration, tokenizer and all else of the source that is no weight."""
    for path in source.folder.iterdir():
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, folder / path.name)
    config: dict[str, Any] = json.loads((source.folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(_described(config, dtype), indent=2) + "\n")


def _described(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Returns the configuration with the dtype of the saved weights, and without quantization."""
    kept = {name: value for name, value in config.items() if name != "quantization_config"}
    names = [name for name in ("dtype", "torch_dtype") if name in kept] or ["dtype"]
    return {**kept, **dict.fromkeys(names, dtype)}


def _publish(temporary: Path, target: Path) -> None:
    """Gives a complete folder its name; an older one of this name is replaced."""
    for path in (*temporary.iterdir(), temporary):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    replaced = target.with_name(f"{INCOMPLETE}{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    temporary.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
