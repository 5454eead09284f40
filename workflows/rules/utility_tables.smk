rule table_utility:
    input:
        metrics="results/summary/metrics.csv",
        paper=PAPER_VALUES,
    output:
        csv=report(
            "results/tables/utility.csv",
            caption="../report/utility.rst",
            category="Utility",
        ),
        markdown="results/tables/utility.md",
    log:
        "results/logs/table_utility.log",
    benchmark:
        "results/benchmarks/table_utility.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.utility_table"),
    shell:
        "python -m paper_figures.utility_table --metrics {input.metrics} --paper {input.paper}"
        " --csv {output.csv} --markdown {output.markdown} > {log} 2>&1"


rule table_lora:
    input:
        metrics="results/summary/metrics.csv",
        paper=PAPER_VALUES,
    output:
        csv=report(
            "results/tables/lora.csv",
            caption="../report/lora.rst",
            category="Utility",
        ),
        markdown="results/tables/lora.md",
    log:
        "results/logs/table_lora.log",
    benchmark:
        "results/benchmarks/table_lora.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.lora_table"),
    shell:
        "python -m paper_figures.lora_table --metrics {input.metrics} --paper {input.paper}"
        " --csv {output.csv} --markdown {output.markdown} > {log} 2>&1"


rule table_low_budget:
    input:
        metrics="results/summary/metrics.csv",
        calibrations=separate_calibrations(),
        paper=PAPER_VALUES,
    output:
        csv=report(
            "results/tables/low_budget.csv",
            caption="../report/low_budget.rst",
            category="Utility",
        ),
        markdown="results/tables/low_budget.md",
    log:
        "results/logs/table_low_budget.log",
    benchmark:
        "results/benchmarks/table_low_budget.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.low_budget_table"),
    shell:
        "python -m paper_figures.low_budget_table --metrics {input.metrics}"
        " --calibrations {input.calibrations} --paper {input.paper}"
        " --csv {output.csv} --markdown {output.markdown} > {log} 2>&1"
