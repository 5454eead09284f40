from snakemake.utils import min_version

min_version("9.20")


# A configuration stands alone: one that is named on the command line inherits nothing from this one.
if not workflow.overwrite_configfiles:

    configfile: "workflows/config/default.yaml"


include: "workflows/rules/common.smk"
include: "workflows/rules/prepare.smk"
include: "workflows/rules/train.smk"
include: "workflows/rules/profile.smk"
include: "workflows/rules/figures.smk"


rule results_all:
    default_target: True
    input:
        figure="results/figures/accuracy_vs_epsilon.png",
        accuracy="results/tables/accuracy.md",
        flops="results/tables/flops.md",
        comparison="results/paper_comparison.md",
    output:
        made="results/all",
    log:
        "results/logs/results_all.log",
    benchmark:
        "results/benchmarks/results_all.tsv"
    conda:
        "envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=100,
    shell:
        "printf '%s\\n' {input} > {output.made} 2> {log}"
