checkpoint calibrate_noise:
    output:
        calibration=CALIBRATION,
    log:
        "results/logs/calibrate_noise/{target}/{method}/eps{epsilon}.log",
    benchmark:
        "results/benchmarks/calibrate_noise/{target}/{method}/eps{epsilon}.tsv"
    conda:
        "../../envs/accounting.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        options=calibration_options,
        code=result_hash("calibration"),
    shell:
        "dprc calibrate {params.options} --out {output.calibration} > {log} 2>&1"


rule train_model:
    input:
        train="results/data/{task}/train.jsonl",
        test="results/data/{task}/test.jsonl",
        dataset="results/data/{task}/dataset.json",
        config=model_file("config.json"),
        weights=model_file("model.safetensors"),
        tokenizer=model_file("tokenizer.json"),
        model=model_file("model.json"),
        calibration=ancient(run_calibration),
    output:
        metrics=METRICS,
        steps=METRICS.replace("metrics.json", "steps.csv"),
        settings=METRICS.replace("metrics.json", "settings.yaml"),
    log:
        "results/logs/train_model/{task}/{mode}/{method}/eps{epsilon}/seed{seed}.log",
    benchmark:
        "results/benchmarks/train_model/{task}/{mode}/{method}/eps{epsilon}/seed{seed}.tsv"
    conda:
        "../../envs/training.yaml"
    # Snakemake sets OMP_NUM_THREADS and its kin to this number, so runs share a machine by cores.
    threads: training_processes
    resources:
        mem_mb=task_resource("mem_mb", 3000),
        gpu=task_resource("gpu", 0),
        runtime=task_resource("runtime", 60),
    # A run that was killed goes on from its last checkpoint, which is no declared output and so
    # stays in the folder; where settings, data or code have changed since, it starts anew.
    params:
        directory=subpath(output.metrics, parent=True),
        settings=training_settings,
        command=training_command,
        code=result_hash("training"),
    shell:
        "printf '%s' {params.settings:q}"
        " | {params.command} --config - --out {params.directory} --resume --overwrite > {log} 2>&1"


rule collect_metrics:
    input:
        runs=training_results(),
        calibrations=task_calibrations(),
    output:
        metrics="results/summary/metrics.csv",
    log:
        "results/logs/collect_metrics.log",
    benchmark:
        "results/benchmarks/collect_metrics.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        code=code_hash("paper_figures.collect_metrics"),
    shell:
        "python -m paper_figures.collect_metrics {input.runs}"
        " --calibrations {input.calibrations} --out {output.metrics} > {log} 2>&1"
