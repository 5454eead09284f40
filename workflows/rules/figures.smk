rule plot_accuracy_vs_epsilon:
    input:
        metrics="results/summary/metrics.csv",
        paper="paper_figures/paper_values.csv",
    output:
        png=report(
            "results/figures/accuracy_vs_epsilon.png",
            caption="../report/accuracy_vs_epsilon.rst",
            category="Utility",
        ),
        pdf="results/figures/accuracy_vs_epsilon.pdf",
    log:
        "results/logs/plot_accuracy_vs_epsilon.log",
    benchmark:
        "results/benchmarks/plot_accuracy_vs_epsilon.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        code=code_hash("paper_figures.accuracy_vs_epsilon"),
    shell:
        "python -m paper_figures.accuracy_vs_epsilon --metrics {input.metrics}"
        " --paper {input.paper} --png {output.png} --pdf {output.pdf} > {log} 2>&1"


rule table_accuracy:
    input:
        metrics="results/summary/metrics.csv",
    output:
        csv=report(
            "results/tables/accuracy.csv",
            caption="../report/accuracy.rst",
            category="Utility",
        ),
        markdown="results/tables/accuracy.md",
    log:
        "results/logs/table_accuracy.log",
    benchmark:
        "results/benchmarks/table_accuracy.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        code=code_hash("paper_figures.accuracy_table"),
    shell:
        "python -m paper_figures.accuracy_table --metrics {input.metrics}"
        " --csv {output.csv} --markdown {output.markdown} > {log} 2>&1"


rule table_flops:
    input:
        flops="results/flops/layers.json",
    output:
        csv=report(
            "results/tables/flops.csv",
            caption="../report/flops.rst",
            category="Cost",
        ),
        markdown="results/tables/flops.md",
    log:
        "results/logs/table_flops.log",
    benchmark:
        "results/benchmarks/table_flops.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        code=code_hash("paper_figures.flops_table"),
    shell:
        "python -m paper_figures.flops_table --flops {input.flops}"
        " --csv {output.csv} --markdown {output.markdown} > {log} 2>&1"


rule compare_paper:
    input:
        paper="paper_figures/paper_values.csv",
        metrics="results/summary/metrics.csv",
        flops="results/flops/layers.json",
        calibrations=separate_calibrations(),
    output:
        csv=report(
            "results/paper_comparison.csv",
            caption="../report/paper_comparison.rst",
            category="Comparison with the paper",
        ),
        markdown="results/paper_comparison.md",
    log:
        "results/logs/compare_paper.log",
    benchmark:
        "results/benchmarks/compare_paper.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        configuration=lambda wildcards: config["name"],
        code=code_hash("paper_figures.compare_paper"),
    shell:
        "python -m paper_figures.compare_paper --configuration {params.configuration}"
        " --paper {input.paper} --metrics {input.metrics} --flops {input.flops}"
        " --calibrations {input.calibrations}"
        " --csv {output.csv} --markdown {output.markdown} > {log} 2>&1"
