rule sweep_noise:
    output:
        noise="results/noise/{sweep}.json",
    log:
        "results/logs/sweep_noise/{sweep}.log",
    benchmark:
        "results/benchmarks/sweep_noise/{sweep}.tsv"
    conda:
        "../../envs/accounting.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        options=lambda wildcards: command_options(
            config["noise_sweeps"][wildcards.sweep]
        ),
        code=result_hash("calibration"),
    shell:
        "dprc sweep-noise {params.options} --out {output.noise} > {log} 2>&1"


rule envelope_cdf:
    output:
        envelope="results/envelope/cdf.json",
    log:
        "results/logs/envelope_cdf.log",
    benchmark:
        "results/benchmarks/envelope_cdf.tsv"
    conda:
        "../../envs/accounting.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        options=command_options(config["envelope"]),
        code=result_hash("envelope"),
    shell:
        "dprc envelope {params.options} --out {output.envelope} > {log} 2>&1"
