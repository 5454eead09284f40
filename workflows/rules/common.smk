"""Helpers of the rules: names of files, options of commands, settings of a training run."""

import json
import os
from itertools import product
from shlex import quote

from dprc.provenance import code_hash, result_hash
from workflows.captions import describe_files
from workflows.configuration import (
    PACKAGED_MODELS,
    check_configuration,
    chosen_epsilons,
)

check_configuration(config)

# Configurations never mix: each but the default one works in a folder of its own, with results and
# Snakemake's records of them. Paths are the same in all: relative to that folder.
if config["name"] != "default":

    workdir: f"results/{config['name']}"


# Wherever a rule works, it runs the code of this Snakefile's folder.
shell.prefix(
    "set -euo pipefail; export PYTHONPATH="
    + quote(workflow.basedir)
    + "${{PYTHONPATH:+:$PYTHONPATH}}; "
)
# It comes with the code, wherever results are stored.
PAPER_VALUES = local(
    os.path.relpath(os.path.join(workflow.basedir, "paper_figures", "paper_values.csv"))
)


wildcard_constraints:
    task="|".join(config["tasks"]),
    target="|".join([*config["tasks"], *config["calibrations"]]),
    model="|".join(config["models"]),
    sweep="|".join(config["noise_sweeps"]),
    mode="full|lora",
    method="|".join(config["methods"]),
    epsilon=r"inf|[0-9.e+-]+",
    seed=r"\d+",
    in_features=r"\d+",
    out_features=r"\d+",
    tokens=r"\d+",
    audit="|".join(config["audit"]["mechanisms"]),


CALIBRATION = "results/calibration/{target}/{method}/eps{epsilon}.json"
METRICS = "results/train/{task}/{mode}/{method}/eps{epsilon}/seed{seed}/metrics.json"
# Keys of a task's evaluation, and what `dprc train` calls them.
EVALUATION = {
    "documents": "evaluation_documents",
    "batch": "evaluation_batch",
    "max_new_tokens": "max_new_tokens",
}
LAYER_PROFILE = (
    "results/layer_profiles/{in_features}x{out_features}/tokens{tokens}.json"
)
AUDIT = "results/audit/{audit}.json"
FIGURES = (
    "accuracy_vs_epsilon",
    "audit_bounds",
    "envelope_cdf",
    "flops_vs_tokens",
    "layer_latency",
    "layer_memory",
    "layer_memory_time",
    "long_context",
    "noise_by_work",
    "noise_overhead",
    "noise_vs_epsilon",
    "noise_vs_probes",
    "norm_error_vs_probes",
    "peers",
    "step_memory",
)
TABLES = (
    "accuracy",
    "audit",
    "complexity",
    "efficiency",
    "flops",
    "layer_latency",
    "layer_memory",
    "lora",
    "low_budget",
    "peers",
    "utility",
)
TABLES_AND_FIGURES = [
    *(
        f"results/figures/{name}.{suffix}"
        for name in FIGURES
        for suffix in ("png", "pdf")
    ),
    *(f"results/tables/{name}.{suffix}" for name in TABLES for suffix in ("csv", "md")),
    *multiext("results/paper_comparison", ".csv", ".md"),
]


def inputs_note(wildcards, input):
    """Say for a caption on which devices and by which code a figure's inputs were made.

    Snakemake compares no parameter whose function takes the rule's input, so it repeats no figure.
    """
    return describe_files(input)


def is_private(method):
    return config["methods"][method] is not None


def epsilon_names(settings, method):
    """Give the privacy budgets of a method as they are written in paths."""
    epsilons = settings["epsilons"] if is_private(method) else [float("inf")]
    return [f"{epsilon:.12g}" for epsilon in epsilons]


def training_runs():
    """List every training run: task, mode, method, epsilon, seed."""
    runs = []
    for task, settings in config["tasks"].items():
        for mode, changes in settings["modes"].items():
            for method, seed in product(
                changes.get("methods", settings["methods"]),
                changes.get("seeds", config["seeds"]),
            ):
                runs += [
                    (task, mode, method, epsilon, seed)
                    for epsilon in epsilon_names(
                        {"epsilons": chosen_epsilons(settings, mode, method)}, method
                    )
                ]
    return runs


def training_results():
    """List the result file of every training run of the configuration."""
    return [
        METRICS.format(task=task, mode=mode, method=method, epsilon=epsilon, seed=seed)
        for task, mode, method, epsilon, seed in training_runs()
    ]


def task_calibrations():
    """List the calibrations that training runs take their noise from."""
    return sorted(
        {
            CALIBRATION.format(target=task, method=method, epsilon=epsilon)
            for task, _, method, epsilon, _ in training_runs()
            if is_private(method)
        }
    )


def separate_calibrations():
    """List the calibrations that no training run uses."""
    return [
        CALIBRATION.format(target=name, method=method, epsilon=epsilon)
        for name, settings in config["calibrations"].items()
        for method in settings["methods"]
        for epsilon in epsilon_names(settings, method)
    ]


def layer_profiles():
    """List the timed layers."""
    settings = config["layer_profiles"]
    return [
        LAYER_PROFILE.format(in_features=d, out_features=p, tokens=tokens)
        for (d, p), tokens in product(settings["layers"], settings["tokens"])
    ]


def noise_by_work_results():
    """List the files of noise multipliers for equal work."""
    return [f"results/noise_by_work/{name}.json" for name in config["noise_by_work"]]


def noise_sweeps():
    """List the files of noise multipliers at many settings."""
    return [f"results/noise/{name}.json" for name in config["noise_sweeps"]]


def audits():
    """List the audited mechanisms."""
    return [AUDIT.format(audit=name) for name in config["audit"]["mechanisms"]]


def audit_options(wildcards):
    """Give `dprc audit` a mechanism, and how long and how surely it is audited."""
    settings = dict(config["audit"])
    mechanism = settings.pop("mechanisms")[wildcards.audit]
    return command_options({**settings, **mechanism})


def all_results():
    """List every result file that tables and figures are made from, and the data and models."""
    return [
        "results/summary/metrics.csv",
        "results/flops/layers.json",
        "results/memory/layers.json",
        "results/memory/steps.json",
        "results/norm_error/errors.json",
        "results/peers/measured.json",
        "results/peers/checked.json",
        *noise_by_work_results(),
        "results/envelope/cdf.json",
        *noise_sweeps(),
        *audits(),
        *layer_profiles(),
        *separate_calibrations(),
        *task_calibrations(),
        *training_results(),
        *(f"results/data/{task}/dataset.json" for task in config["tasks"]),
        *sorted(
            {
                f"results/models/{task['model']}/model.json"
                for task in config["tasks"].values()
            }
        ),
    ]


def missing_files(wildcards):
    """List the files of this workflow that are not there.

    Behind a target that exists Snakemake looks for no missing file. As a parameter of the last rule,
    which changes when a file is deleted, the list makes it look.
    """
    return [
        path
        for path in [*TABLES_AND_FIGURES, *all_results()]
        if not os.path.exists(path)
    ]


def command_options(settings):
    """Write a mapping as options of a command.

    num_probes: [8, 16] becomes --num-probes 8,16; true becomes the bare option, false nothing.
    """

    def option(key, value):
        name = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            return name if value else ""
        if isinstance(value, list):
            value = ",".join(map(str, value))
        return f"{name} {value}"

    return " ".join(filter(None, (option(*item) for item in settings.items())))


def calibration_options(wildcards):
    """Give `dprc calibrate` the mechanism, the budget and the length of the run."""
    if wildcards.target in config["tasks"]:
        task = config["tasks"][wildcards.target]
        settings = {**task["privacy"], **task["training"]}
    else:
        settings = config["calibrations"][wildcards.target]
    method = dict(config["methods"][wildcards.method])
    # The schedule changes how a step is computed, not what it costs in privacy.
    method.pop("schedule", None)
    return command_options(
        {
            "epsilon": wildcards.epsilon,
            **{key: settings[key] for key in ("delta", "sample_rate", "steps")},
            **method,
        }
    )


def model_file(name):
    """Give the input function of a file of the task's model."""
    return (
        lambda wildcards: f"results/models/{config['tasks'][wildcards.task]['model']}/{name}"
    )


def run_calibration(wildcards):
    """Give the calibration a training run takes its noise from; none without privacy.

    Calibration is a checkpoint: once it is there, Snakemake decides anew which runs to repeat.
    """
    if not is_private(wildcards.method):
        return []
    return checkpoints.calibrate_noise.get(
        target=wildcards.task, method=wildcards.method, epsilon=wildcards.epsilon
    ).output.calibration


def training_settings(wildcards):
    """Write the settings of one training run as JSON, the calibrated noise among them.

    The noise multiplier is part of the parameters, so a run is repeated when the noise changed and
    not whenever the calibration ran again. Snakemake compares only parameters whose function does
    not take the rule's input, so the calibration is found from the wildcards.
    """
    task = config["tasks"][wildcards.task]
    privacy = None
    if is_private(wildcards.method):
        with open(run_calibration(wildcards), encoding="utf-8") as handle:
            calibrated = json.load(handle)["privacy"]
        privacy = {key: calibrated[key] for key in ("epsilon", "delta")}
        privacy["noise_multiplier"] = calibrated["noise_multiplier"]
        privacy["max_grad_norm"] = task["privacy"]["max_grad_norm"]
    mode = task["modes"][wildcards.mode]
    rate = mode.get("learning_rate", task["training"]["learning_rate"])
    settings = {
        "task": {
            "name": wildcards.task,
            "data": f"results/data/{wildcards.task}",
            "max_tokens": task["max_tokens"],
            **{
                EVALUATION[key]: value
                for key, value in task.get("evaluation", {}).items()
            },
        },
        "model": {
            "path": f"results/models/{task['model']}",
            "mode": wildcards.mode,
            **task.get("loading", {}),
        },
        "method": config["methods"][wildcards.method],
        "privacy": privacy,
        "training": {**task["training"], "learning_rate": rate},
        "seed": int(wildcards.seed),
        "privacy_seed": config["privacy_seed"],
        "output": {"save_model": False},
    }
    if "strategy" in task.get("parallel", {}):
        settings["parallel"] = {"strategy": task["parallel"]["strategy"]}
    if wildcards.mode == "lora":
        settings["model"]["lora"] = {
            key: mode[key] for key in ("rank", "alpha", "targets")
        }
    return json.dumps(settings)


def training_processes(wildcards):
    """Give how many processes train the model of a task together."""
    return config["tasks"][wildcards.task].get("parallel", {}).get("processes", 1)


def training_command(wildcards):
    """Give the command of a training run, in one process or in several."""
    count = training_processes(wildcards)
    # A step and its checkpoint may take longer than the 30 seconds that torchrun waits at SIGTERM.
    # Older versions of torchrun ignore the variable; they refuse the option.
    wait = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600"
    several = f"{wait} torchrun --standalone --nproc-per-node {count} -m "
    return (several if count > 1 else "") + "dprc train"


def task_resource(name, default):
    """Give the function of a resource that a task may set for its training runs."""
    return lambda wildcards: (
        config["tasks"][wildcards.task].get("resources", {}).get(name, default)
    )


def with_layers(settings):
    """Write layers as commands take them: [8192, 2048] becomes 8192x2048."""
    return {**settings, "layers": [f"{d}x{p}" for d, p in settings["layers"]]}


def layer_profile_options(wildcards):
    """Give `dprc profile-layer` the layer and how it is measured."""
    settings = dict(config["layer_profiles"])
    del settings["layers"]
    return command_options(
        {
            "in_features": wildcards.in_features,
            "out_features": wildcards.out_features,
            "estimator": settings.pop("estimators"),
            **{**settings, "tokens": wildcards.tokens},
        }
    )


def norm_error_model(wildcards):
    """Give the files of the model whose gradients are used; none if it comes as a package."""
    model = config["norm_error"]["model"]
    if model in PACKAGED_MODELS:
        return []
    names = ("config.json", "model.safetensors", "tokenizer.json", "model.json")
    return [f"results/models/{model}/{name}" for name in names]


def norm_error_options(wildcards):
    """Give `dprc measure-norm-error` its gradients, probe counts and repeats."""
    settings = dict(config["norm_error"])
    if settings["model"] not in PACKAGED_MODELS:
        settings["model"] = f"results/models/{settings['model']}"
    return command_options({**settings, "data": f"results/data/{settings['task']}"})
