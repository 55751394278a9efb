"""What ``transformers`` computes for the tokens of a run: ``oracle.py JOBS.json ANSWERS.json``; without Megatron.

Each job names a model's folder, a step, and the files that ranks wrote: in groups with the same tokens, the first
pipeline stage first, and different parts of the vocabulary. Its answer has the largest differences, divided by the
largest value: of losses per token and of logits in Megatron's run, and of the gradient of each weight.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def per_expert(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor in the names of files, where each expert has tensors of its own."""
    folder, _, part = name.rpartition(".experts.")
    if part == "gate_up_proj":
        halves = [(end, half) for one in value for end, half in zip(("gate", "up"), one.chunk(2), strict=True)]
        return {f"{folder}.experts.{i // 2}.{end}_proj.weight": half for i, (end, half) in enumerate(halves)}
    if part == "down_proj":
        return {f"{folder}.experts.{number}.down_proj.weight": one for number, one in enumerate(value)}
    return {name: value}


def answer(job: dict[str, Any]) -> dict[str, float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ranks = [[torch.load(path) for path in group] for group in job["ranks"]]
    calls = [each for group in ranks for each in zip(*(one["steps"][job["step"]] for one in group), strict=True)]
    found: dict[str, float] = {"losses": 0.0, "logits": 0.0, "num_calls": len(calls)}
    mean = torch.zeros(())
    for parts in calls:
        call, ours_SBV = parts[-1], torch.cat([part["logits"] for part in parts], -1)
        logits_BSV = model(parts[0]["tokens"]).logits
        losses = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), call["labels"].flatten(), reduction="none")
        mean = mean + losses.mean() / len(calls)
        found["losses"] = max(found["losses"], difference(call["losses"].flatten(), losses.detach()))
        found["logits"] = max(found["logits"], difference(ours_SBV.transpose(0, 1), logits_BSV.detach()))
    found["mean_loss"] = mean.item()
    if job["gradients"]:
        ours = ranks[0][0]["gradients"]
        mean.backward()
        theirs: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            theirs |= per_expert(name, parameter.grad)
        assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
        found["gradients"] = max(difference(ours[name], theirs[name]) for name in theirs)
        found["num_gradients"] = len(theirs)
    return found


if __name__ == "__main__":
    torch.set_num_threads(2)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([answer(job) for job in jobs]))
