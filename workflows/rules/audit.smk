rule audit_privacy:
    output:
        audit=AUDIT,
    log:
        "results/logs/audit_privacy/{audit}.log",
    benchmark:
        "results/benchmarks/audit_privacy/{audit}.tsv"
    conda:
        "../../envs/training.yaml"
    threads: 1
    resources:
        mem_mb=1500,
    params:
        options=audit_options,
        code=result_hash("audit"),
    shell:
        # A refuted claim stops the workflow.
        "dprc audit {params.options} --out {output.audit} > {log} 2>&1"


rule table_audit:
    input:
        audits=audits(),
    output:
        csv=report(
            "results/tables/audit.csv",
            caption="../report/audit.rst",
            category="Privacy",
        ),
        markdown="results/tables/audit.md",
    log:
        "results/logs/table_audit.log",
    benchmark:
        "results/benchmarks/table_audit.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.audit_table"),
    shell:
        "python -m paper_figures.audit_table {input.audits}"
        " --csv {output.csv} --markdown {output.markdown} > {log} 2>&1"


rule plot_audit_bounds:
    input:
        audits=audits(),
    output:
        png=report(
            "results/figures/audit_bounds.png",
            caption="../report/audit_bounds.rst",
            category="Privacy",
        ),
        pdf="results/figures/audit_bounds.pdf",
    log:
        "results/logs/plot_audit_bounds.log",
    benchmark:
        "results/benchmarks/plot_audit_bounds.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.audit_bounds"),
    shell:
        "python -m paper_figures.audit_bounds {input.audits}"
        " --png {output.png} --pdf {output.pdf} > {log} 2>&1"
