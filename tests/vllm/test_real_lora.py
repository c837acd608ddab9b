"""One real vLLM server with adapters: each is seen to have arrived, also where the prefix cache knows the prompt."""

import copy
import json
import shutil

import httpx
import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from real_vllm import prompts_of, scorer, serving, train, wait_until_up

from memopd.engine import Request
from memopd.engine.protocol import Completion
from memopd.engine.vllm import weights as weight_updates
from memopd.engine.vllm.engine import StaleWeights, VllmEngine, rounding_tolerance
from memopd.record import read_episodes
from memopd.train.metrics import read_metrics
from memopd.types import Sampling

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = "\n[lora]\nrank = 4\n"


@pytest.fixture(scope="module")
def server(first):
    with serving(first[0], None, lora_rank=4) as running:
        wait_until_up(running)
        yield running


@pytest.fixture(scope="module")
def adapters(first, tmp_path_factory):
    """Two adapters over the same base, with random B: (folder, model)."""
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(folder / str(seed), first[1], seed) for seed in (1, 2)]


def make_adapter(folder, model, seed, rank=4):
    import torch

    torch.manual_seed(seed)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=rank, lora_alpha=8, target_modules=TARGETS)).eval()
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(folder)
    return folder, adapted


def requests_of(tokenizer, count=8):
    """Prompts of several blocks of the prefix cache."""
    return [Request(p, i, Sampling(max_tokens=32)) for i, p in enumerate(prompts_of(tokenizer, count, longest=300))]


def gap(model, requests, completions):
    pairs = [(r.prompt, c.tokens) for r, c in zip(requests, completions, strict=True)]
    return weight_updates.gap(scorer(model)(pairs, 1.0), completions)


def test_the_second_adapter_is_in_the_next_batch(server, first, adapters):
    """The prompts are those of before, so blocks of the first adapter, or of the bare model, would show."""
    _, base, tokenizer = first
    requests = requests_of(tokenizer)
    engine = VllmEngine([server.url], tokenizer)
    bare = engine.generate(requests)
    assert gap(base, requests, bare) < 1e-3
    for version, (folder, model) in enumerate(adapters, 1):
        engine.update(folder, version)
        pairs = [(r.prompt, c.tokens) for r, c in zip(requests, bare, strict=True)]
        tolerance = rounding_tolerance(scorer(model), scorer(copy.deepcopy(model).double()), pairs, 1.0)
        (verified,) = engine.verify(scorer(model), [r.prompt for r in requests], tolerance=tolerance).values()
        completions = engine.generate(requests)
        assert {c.policy_version for c in completions} == {version}
        gaps = [gap(m, requests, completions) for m in (base, adapters[0][1], adapters[1][1])]
        print(f"\nadapter {version}: gap {verified:.1e}, tolerance {tolerance:.1e}; from the base and both {gaps}")
        assert gaps.pop(version) <= tolerance < 1e-3 < min(gaps)
    served = {m["id"] for m in httpx.get(f"{server.url}/v1/models").json()["data"] if m["parent"]}
    assert served == {f"2@adapter:{adapters[1][0]}"}
    engine.close()


def test_a_prefix_cache_that_is_kept_is_noticed(server, first, adapters, tmp_path, monkeypatch):
    """A folder whose content changed: its old blocks have the same key. The update drops them, and the check would see
    if it did not."""
    _, _, tokenizer = first
    prompts = [r.prompt for r in requests_of(tokenizer, 4)]
    (one, before), (two, after) = adapters
    folder = shutil.copytree(one, tmp_path / "adapter")
    engine = VllmEngine([server.url], tokenizer, adapter=folder)
    engine.verify(scorer(before), prompts, tolerance=1e-3)
    shutil.copytree(two, folder, dirs_exist_ok=True)

    async def keep(fleet, server):
        pass

    with monkeypatch.context() as patch:
        patch.setattr(weight_updates, "_reset_prefix_cache", keep)
        engine.update(folder, version=0)
    with pytest.raises(StaleWeights, match="the adapter's base"):
        engine.verify(scorer(after), prompts, tolerance=1e-3)
    engine.update(folder, version=0)
    engine.verify(scorer(after), prompts, tolerance=1e-3)
    engine.close()


def test_an_adapter_that_was_lost_is_put_back(server, first, adapters):
    """As after a restart: the server knows neither the adapter nor its label."""
    folder, model = adapters[0]
    engine = VllmEngine([server.url], first[2], adapter=folder, version=7)
    name = f"7@adapter:{folder}"
    httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()
    httpx.post(f"{server.url}/update_weight_version", json={"new_version": "default"}).raise_for_status()
    requests = requests_of(first[2], 4)
    completions = engine.generate(requests)
    assert {c.policy_version for c in completions} == {7}
    assert gap(model, requests, completions) < 1e-3
    follower = VllmEngine([server.url], first[2])  # whoever gives no weights samples with the adapter that is there
    completions = follower.generate(requests)
    assert {c.policy_version for c in completions} == {7}
    assert gap(model, requests, completions) < 1e-3
    follower.close()
    engine.close()


def test_an_adapter_that_the_server_cannot_hold_is_said_in_one_line(server, first, tmp_path):
    folder, _ = make_adapter(tmp_path / "wide", first[1], seed=3, rank=9)
    with pytest.raises(ValueError, match=f"{server.url} refuses the adapter {folder}: .*rank 9 .*max_lora_rank 8"):
        VllmEngine([server.url], first[2], adapter=folder)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_rollouts_on_a_server_are_sampled_with_the_adapter_and_audited_with_it(
    server, first, adapters, searchable, tmp_path, call_main
):
    folder, _ = adapters[0]
    model = ("--model", first[0], "--adapter", folder)
    where = ("-o", tmp_path / "store", "--index", searchable / "index", "--servers", server.url)
    lengths = ("--max-tokens", 40, "--max-context", 400)
    code, _, error = call_main("rollout", searchable / "tasks.jsonl", *where, *model, *lengths)
    assert code == 0, error
    code, said, error = call_main("audit", tmp_path / "store", *model, "--json")
    assert code == 0, error
    assert json.loads(said)["recorded"]["p99"] < 1e-3
    bare = json.loads(call_main("audit", tmp_path / "store", "--model", first[0], "--json")[1])
    assert bare["recorded"]["p99"] > 1


def test_training_gives_the_server_the_adapter_of_every_update(server, first, searchable, tmp_path):
    """Two steps, after each of which the server samples with the adapter that was trained; its weights stay."""
    ended = train(searchable, first[0], server.url, tmp_path / "run", LORA)
    assert ended.returncode == 0, ended.stderr
    steps = read_metrics(tmp_path / "run")
    assert len(steps) == 2
    assert all(m["sampler_gap"] < 1e-3 and m["grad_norm"] > 0 for m in steps)
    for version in range(2):
        assert f"{server.url}: version {version}, log-probabilities within" in ended.stderr
        episodes = list(read_episodes(tmp_path / "run" / "episodes" / f"step-{version:06d}.parquet"))
        assert {c.policy_version for e in episodes for c in e.calls} == {version}
    served = tmp_path.resolve() / "run" / "served" / "adapter-1"
    assert list(served.parent.iterdir()) == [served]
    assert httpx.get(f"{server.url}/weight_info").json()["weight_version"] == f"1@adapter:{served}"
    assert "reload_weights" not in server.log.read_text()
    print("\n" + "\n".join(line for line in ended.stderr.splitlines() if "log-probabilities within" in line))
    # The second step's episodes are those of the adapter after the first, and not of the bare base, where it started.
    calls = [c for e in episodes for c in e.calls]
    said = [Completion(c.completion, c.logprobs, c.stop) for c in calls]
    pairs = [(c.prompt, c.completion) for c in calls]
    adapted = PeftModel.from_pretrained(copy.deepcopy(first[1]), served).eval()
    gaps = [weight_updates.gap(scorer(model)(pairs, 1.0), said) for model in (adapted, first[1])]
    print(f"the second step's log-probabilities are {gaps[0]:.1e} from the adapter's and {gaps[1]:.2g} from the base's")
    assert gaps[0] < 1e-3 < 0.1 < gaps[1]
