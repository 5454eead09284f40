rule noise_by_work:
    output:
        noise="results/noise_by_work/{run}.json",
    log:
        "results/logs/noise_by_work/{run}.log",
    benchmark:
        "results/benchmarks/noise_by_work/{run}.tsv"
    wildcard_constraints:
        run="|".join(config["noise_by_work"]),
    conda:
        "../../envs/accounting.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        options=lambda wildcards: command_options(
            config["noise_by_work"][wildcards.run]
        ),
        code=result_hash("calibration"),
    shell:
        "dprc noise-by-work {params.options} --out {output.noise} > {log} 2>&1"


rule plot_noise_by_work:
    input:
        noise=noise_by_work_results(),
    output:
        png=report(
            "results/figures/noise_by_work.png",
            caption="../report/noise_by_work.rst",
            category="Utility",
        ),
        pdf="results/figures/noise_by_work.pdf",
    log:
        "results/logs/plot_noise_by_work.log",
    benchmark:
        "results/benchmarks/plot_noise_by_work.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.noise_by_work"),
    shell:
        "python -m paper_figures.noise_by_work {input.noise}"
        " --png {output.png} --pdf {output.pdf} > {log} 2>&1"
