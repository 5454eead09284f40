rule prepare_dataset:
    output:
        train="results/data/{task}/train.jsonl",
        test="results/data/{task}/test.jsonl",
        card="results/data/{task}/dataset.json",
    log:
        "results/logs/prepare_dataset/{task}.log",
    benchmark:
        "results/benchmarks/prepare_dataset/{task}.tsv"
    conda:
        "../../envs/training.yaml"
    threads: 1
    resources:
        mem_mb=4000,
    params:
        directory=subpath(output.card, parent=True),
        code=result_hash("data"),
    shell:
        "dprc prepare-data --task {wildcards.task} --out {params.directory} > {log} 2>&1"


rule prepare_model:
    output:
        config="results/models/{model}/config.json",
        weights="results/models/{model}/model.safetensors",
        tokenizer="results/models/{model}/tokenizer.json",
        card="results/models/{model}/model.json",
    log:
        "results/logs/prepare_model/{model}.log",
    benchmark:
        "results/benchmarks/prepare_model/{model}.tsv"
    conda:
        "../../envs/training.yaml"
    threads: 1
    resources:
        mem_mb=4000,
    params:
        directory=subpath(output.card, parent=True),
        options=lambda wildcards: command_options(config["models"][wildcards.model]),
        code=result_hash("model"),
    shell:
        "dprc prepare-model {params.options} --out {params.directory} > {log} 2>&1"
