rule count_flops:
    output:
        flops="results/flops/layers.json",
    log:
        "results/logs/count_flops.log",
    benchmark:
        "results/benchmarks/count_flops.tsv"
    conda:
        "../../envs/training.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        options=command_options(with_layers(config["flops"])),
        code=result_hash("flops"),
    shell:
        "dprc count-flops {params.options} --out {output.flops} > {log} 2>&1"


rule simulate_layer_memory:
    output:
        memory="results/memory/layers.json",
    log:
        "results/logs/simulate_layer_memory.log",
    benchmark:
        "results/benchmarks/simulate_layer_memory.tsv"
    conda:
        "../../envs/training.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        options=command_options(with_layers(config["memory"]["layers"])),
        code=result_hash("layer_memory"),
    shell:
        "dprc simulate-memory {params.options} --out {output.memory} > {log} 2>&1"


rule simulate_step_memory:
    output:
        memory="results/memory/steps.json",
    log:
        "results/logs/simulate_step_memory.log",
    benchmark:
        "results/benchmarks/simulate_step_memory.tsv"
    conda:
        "../../envs/training.yaml"
    threads: 1
    resources:
        mem_mb=3000,
    params:
        options=command_options(config["memory"]["steps"]),
        code=result_hash("step_memory"),
    shell:
        "dprc simulate-memory {params.options} --out {output.memory} > {log} 2>&1"


rule profile_layer:
    output:
        profile=LAYER_PROFILE,
    log:
        "results/logs/profile_layer/{in_features}x{out_features}/tokens{tokens}.log",
    benchmark:
        "results/benchmarks/profile_layer/{in_features}x{out_features}/tokens{tokens}.tsv"
    conda:
        "../../envs/training.yaml"
    # All cores, so that nothing runs beside a measurement.
    threads: workflow.cores
    resources:
        mem_mb=6000,
        gpu=int(config["layer_profiles"]["device"] == "cuda"),
    params:
        options=layer_profile_options,
        code=result_hash("layer_profile"),
    shell:
        "dprc profile-layer {params.options} --out {output.profile} > {log} 2>&1"


rule measure_norm_error:
    input:
        train=f"results/data/{config['norm_error']['task']}/train.jsonl",
        test=f"results/data/{config['norm_error']['task']}/test.jsonl",
        dataset=f"results/data/{config['norm_error']['task']}/dataset.json",
        model=norm_error_model,
    output:
        errors="results/norm_error/errors.json",
    log:
        "results/logs/measure_norm_error.log",
    benchmark:
        "results/benchmarks/measure_norm_error.tsv"
    conda:
        "../../envs/training.yaml"
    threads: 1
    resources:
        mem_mb=4000,
        gpu=int(config["norm_error"]["device"] == "cuda"),
    params:
        options=norm_error_options,
        code=result_hash("norm_error"),
    shell:
        "dprc measure-norm-error {params.options} --out {output.errors} > {log} 2>&1"
