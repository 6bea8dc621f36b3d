"""Whole projections from the committed calibrations: the plan that is chosen, and its time."""

from pathlib import Path

from tests.commands import projected


def step_s(folder: Path, words: str) -> float:
    """The median step of a projection."""
    return float(projected(folder, f"--engine timeline {words}")["step_time_s"]["median"])


def test_the_fastest_over_a_slow_network_has_no_stages(tmp_path: Path) -> None:
    """The closed form misses what pipelines take there, and not what replicas take."""
    given = "--gpus 128 --model gpt2-large --fabric ethernet-100g --global-batch 1024"
    given += " --system 2x-h100"
    best = step_s(tmp_path, f"{given} --tp 1 --pp 1 --microbatch 8")
    assert step_s(tmp_path, given) <= best * 1.001


def test_recomputing_lengthens_sharded_steps_whose_experts_wait(tmp_path: Path) -> None:
    """What units wait for their host inside is no second time there to hide messages behind."""
    given = "--gpus 64 --model mixtral-8x7b --tp 2 --pp 1 --ep 4 --sequence-parallel --zero 3"
    given += " --overlap --seq-len 1024 --microbatch 1 --global-batch 64 --system 8x-h200"
    none, full = (step_s(tmp_path, f"{given} --recompute {way}") for way in ("none", "full"))
    assert none < full


def test_more_work_lengthens_sharded_steps_that_wait_for_their_host(tmp_path: Path) -> None:
    """Twice the tokens in as many microbatches: what is sent hides beside the wait, too."""
    given = "--gpus 256 --model gpt2-xl --tp 1 --pp 2 --zero 3 --recompute full --overlap"
    given += " --system 8x-h200"
    one, two = (
        step_s(tmp_path, f"{given} --microbatch {size} --global-batch {512 * size}")
        for size in (1, 2)
    )
    assert one <= two


def test_a_pipeline_that_does_not_divide_the_layers_is_as_even_as_the_search_has_it(
    tmp_path: Path,
) -> None:
    """Stages that were asked for by number alone, as `simulate.search` takes them."""
    words = "--gpus 24 --model llama3-70b --tp 8 --pp 3 --global-batch 48 --system 8x-h200"
    found = projected(tmp_path, words)["inputs"]["parallelism"]
    assert found["layers_per_stage"] == [27, 27, 26]


def test_one_node_without_ports_projects_by_itself(tmp_path: Path) -> None:
    words = "--node 4x-h200 --gpus 4 --model llama3-8b --tp 4 --pp 1 --global-batch 8"
    value = projected(tmp_path, words)
    assert [one["tier"] for one in value["fabric"]] == ["scale-up"]
    assert value["inputs"]["node_gbits_per_s"] is None
