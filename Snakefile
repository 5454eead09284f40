from snakemake.utils import min_version

min_version("9.20")


# A configuration stands alone: one that is named on the command line inherits nothing from this one.
if not workflow.overwrite_configfiles:

    configfile: "workflows/config/default.yaml"


include: "workflows/rules/common.smk"
include: "workflows/rules/prepare.smk"
include: "workflows/rules/accounting.smk"
include: "workflows/rules/train.smk"
include: "workflows/rules/profile.smk"
include: "workflows/rules/audit.smk"
include: "workflows/rules/figures.smk"
include: "workflows/rules/utility_tables.smk"
include: "workflows/rules/cost_figures.smk"
include: "workflows/rules/privacy_figures.smk"


onstart:
    # Snakemake would record the parameters it compared before the run; those that read a file are
    # known only after the job that makes the file.
    workflow.persistence._params.cache_clear()


rule results_all:
    default_target: True
    input:
        tables_and_figures=TABLES_AND_FIGURES,
        results=all_results(),
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
    params:
        missing=missing_files,
    shell:
        "printf '%s\\n' {input} > {output.made} 2> {log}"
