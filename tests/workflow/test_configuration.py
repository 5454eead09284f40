"""A configuration is either exactly what the schema knows or refused with one clear line."""

import copy

import pytest
import yaml
from snakemake_interface_common.exceptions import WorkflowError

from workflows.configuration import check_configuration, chosen_epsilons

TASK = ("tasks", "bbc_offline")


def changed(config, path, value):
    """Copy a configuration and set one key, however deep."""
    config = copy.deepcopy(config)
    section = config
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    return config


@pytest.mark.parametrize("name", ["smoke", "default", "paper"])
def test_shipped_configurations_are_accepted(configuration, name):
    config = configuration(name)
    check_configuration(config)
    assert config["name"] == name


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("epsilonz",), [9], ["unknown key 'epsilonz'"]),
        ((*TASK, "training", "stepz"), 3, ["tasks.bbc_offline.training", "unknown key 'stepz'"]),
        (("methods", "exact", "probes"), 3, ["methods.exact", "unknown key 'probes'"]),
        (("seeds",), "0", ["seeds", "'0' is not of type 'array'"]),
        ((*TASK, "training", "steps"), "20", ["training.steps", "'20' is not of type 'integer'"]),
        ((*TASK, "training", "steps"), 0, ["training.steps", "0 is less than the minimum"]),
        ((*TASK, "training", "sample_rate"), 1.5, ["training.sample_rate", "1.5"]),
        ((*TASK, "privacy", "epsilons"), [0], ["privacy.epsilons.0", "0 is less than or equal"]),
        ((*TASK, "privacy", "epsilons"), [9, -2], ["privacy.epsilons.1", "-2"]),
        ((*TASK, "privacy", "delta"), 0, ["privacy.delta", "0 is less than or equal"]),
        ((*TASK, "privacy", "delta"), 1, ["privacy.delta", "1 is greater than or equal"]),
        ((*TASK, "privacy", "delta"), "1e-5", ["privacy.delta", "write 1.0e-5"]),
        (
            (*TASK, "privacy", "epsilons_of"),
            {"exactly": [9]},
            ["privacy.epsilons_of.exactly", "no such method", "known: nonprivate, exact"],
        ),
        (
            (*TASK, "privacy", "epsilons_of"),
            {"exact": [3]},
            ["privacy.epsilons_of.exact", "3 is none of tasks.bbc_offline.privacy.epsilons"],
        ),
        (("methods", "exact", "estimator"), "exactt", ["methods.exact.estimator", "'exactt'"]),
        (("tasks", "bcc"), {}, ["tasks", "'bcc'"]),
        ((*TASK, "methods"), ["hutchison"], ["unknown method 'hutchison'", "known: nonprivate"]),
        ((*TASK, "modes", "loraa"), {}, ["tasks.bbc_offline.modes", "unknown key 'loraa'"]),
        ((*TASK, "modes", "lora"), {"rank": 8, "alpha": 8}, ["modes.lora", "'targets' is a req"]),
        ((*TASK, "modes", "full"), {"rank": 8}, ["modes.full", "unknown key 'rank'"]),
        ((*TASK, "modes", "lora", "targets"), "all", ["modes.lora.targets", "'all'"]),
        ((*TASK, "modes", "full"), {"methods": ["ghots"]}, ["modes.full.methods", "'ghots'"]),
        ((*TASK, "modes"), {}, ["tasks.bbc_offline.modes"]),
        ((*TASK, "loading"), {"dtype": "float16"}, ["loading.dtype", "'float16' is unknown"]),
        ((*TASK, "evaluation"), {"document": 3}, ["evaluation", "unknown key 'document'"]),
        ((*TASK, "parallel"), {"processes": 0}, ["parallel.processes", "0 is less than the min"]),
        ((*TASK, "parallel"), {"gpus": 2}, ["parallel", "unknown key 'gpus'"]),
        (
            (*TASK, "parallel"),
            {"processes": 2, "strategy": "ddp"},
            ["parallel.strategy", "'ddp' is unknown (known: replicate, shard)"],
        ),
        ((*TASK, "resources"), {"gpu": 2}, ["resources.gpu: 2 for 1 process(es)"]),
        (("models", "tiny-llama", "preset"), "tiny", ["models.tiny-llama.preset", "'tiny'"]),
        ((*TASK, "model"), "large-llama", ["unknown model 'large-llama'", "known: tiny-llama"]),
        (("flops", "tokens"), 4096, ["flops.tokens", "4096 is not of type 'array'"]),
        (("flops", "layers"), [[2048]], ["flops.layers.0", "[2048] is too short"]),
        (("memory", "steps", "dtype"), "fp8", ["memory.steps.dtype", "known: fp32, bf16"]),
        (("memory", "steps", "modes"), ["exact"], ["memory.steps.modes.0", "'exact' does not"]),
        (("layer_profiles", "device"), "gpu", ["layer_profiles.device", "'gpu' is unknown"]),
        (("layer_profiles", "estimators"), ["exat"], ["layer_profiles.estimators.0", "'exat'"]),
        (("audit", "trials"), 10, ["audit.trials", "10 is less than the minimum of 200"]),
        (("audit", "mechanisms"), {}, ["audit.mechanisms"]),
        (("norm_error", "repeats"), 1, ["norm_error.repeats", "1 is less than the minimum of 2"]),
        (("norm_error", "model"), "gpt", ["norm_error.model", "known: smollm2-135m, tiny-llama"]),
        (("norm_error", "task"), "bbc", ["norm_error.task", "known: bbc_offline"]),
        (("methods", "exact", "num_probes"), 8, ["methods.exact", "has no 'num_probes'"]),
        (("methods", "hutchinson"), {"estimator": "hutchinson"}, ["needs 'num_probes'"]),
        (
            ("calibrations", "extra"),
            {
                "methods": ["nonprivate"],
                "epsilons": [1],
                "delta": 1e-5,
                "sample_rate": 0.1,
                "steps": 10,
            },
            ["calibrations.extra.methods", "'nonprivate' is not private"],
        ),
    ],
)
def test_a_wrong_key_is_refused_by_name(configuration, path, value, words):
    config = changed(configuration("smoke"), path, value)
    with pytest.raises(WorkflowError) as refused:
        check_configuration(config)
    lines = str(refused.value).splitlines()
    assert any(all(word in line for word in words) for line in lines), lines


def test_a_missing_key_is_refused_by_name(configuration):
    config = configuration("smoke")
    del config["tasks"]["bbc_offline"]["training"]
    with pytest.raises(WorkflowError, match="'training' is a required property"):
        check_configuration(config)


def test_a_mode_may_run_less_and_with_another_learning_rate(configuration):
    less = {"methods": ["exact"], "epsilons": [1], "seeds": [3], "learning_rate": 0.1}
    check_configuration(changed(configuration("smoke"), (*TASK, "modes", "full"), less))


def test_snakemake_refuses_an_unknown_key_in_one_line(project, configuration, tmp_path):
    wrong = changed(configuration("smoke"), (*TASK, "training", "stepz"), 3)
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(wrong))
    done = project.snakemake("--dry-run", "--configfile", str(path), "--", "results/all")
    assert done.returncode != 0
    (line,) = [line for line in done.stdout.splitlines() if "stepz" in line]
    assert line.startswith("configuration: tasks.bbc_offline.training: unknown key 'stepz'")
    assert "Traceback" not in done.stdout


def test_a_method_may_run_at_some_budgets_only():
    task = {
        "privacy": {"epsilons": [0.7, 2, 9], "epsilons_of": {"hutchpp_paper": [0.7]}},
        "modes": {"full": {}, "lora": {"epsilons": [2, 9]}},
    }
    assert chosen_epsilons(task, "full", "exact") == [0.7, 2, 9]
    assert chosen_epsilons(task, "full", "hutchpp_paper") == [0.7]
    assert chosen_epsilons(task, "lora", "exact") == [2, 9]
    assert chosen_epsilons(task, "lora", "hutchpp_paper") == []
