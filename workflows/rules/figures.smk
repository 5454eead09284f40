rule plot_accuracy_vs_epsilon:
    input:
        metrics="results/summary/metrics.csv",
        paper=PAPER_VALUES,
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
        inputs=inputs_note,
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
        inputs=inputs_note,
        code=code_hash("paper_figures.accuracy_table"),
    shell:
        "python -m paper_figures.accuracy_table --metrics {input.metrics}"
        " --csv {output.csv} --markdown {output.markdown} > {log} 2>&1"


rule table_flops:
    input:
        flops="results/flops/layers.json",
        paper=PAPER_VALUES,
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
        inputs=inputs_note,
        code=code_hash("paper_figures.flops_table"),
    shell:
        "python -m paper_figures.flops_table --flops {input.flops} --paper {input.paper}"
        " --csv {output.csv} --markdown {output.markdown} > {log} 2>&1"


rule plot_flops_vs_tokens:
    input:
        flops="results/flops/layers.json",
    output:
        png=report(
            "results/figures/flops_vs_tokens.png",
            caption="../report/flops_vs_tokens.rst",
            category="Cost",
        ),
        pdf="results/figures/flops_vs_tokens.pdf",
    log:
        "results/logs/plot_flops_vs_tokens.log",
    benchmark:
        "results/benchmarks/plot_flops_vs_tokens.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.flops_vs_tokens"),
    shell:
        "python -m paper_figures.flops_vs_tokens --flops {input.flops}"
        " --png {output.png} --pdf {output.pdf} > {log} 2>&1"


rule table_layer_latency:
    input:
        profiles=layer_profiles(),
    output:
        csv=report(
            "results/tables/layer_latency.csv",
            caption="../report/layer_latency.rst",
            category="Cost",
        ),
        markdown="results/tables/layer_latency.md",
    log:
        "results/logs/table_layer_latency.log",
    benchmark:
        "results/benchmarks/table_layer_latency.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.layer_latency_table"),
    shell:
        "python -m paper_figures.layer_latency_table {input.profiles}"
        " --csv {output.csv} --markdown {output.markdown} > {log} 2>&1"


rule plot_layer_latency:
    input:
        profiles=layer_profiles(),
    output:
        png=report(
            "results/figures/layer_latency.png",
            caption="../report/layer_latency.rst",
            category="Cost",
        ),
        pdf="results/figures/layer_latency.pdf",
    log:
        "results/logs/plot_layer_latency.log",
    benchmark:
        "results/benchmarks/plot_layer_latency.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.layer_latency"),
    shell:
        "python -m paper_figures.layer_latency {input.profiles}"
        " --png {output.png} --pdf {output.pdf} > {log} 2>&1"


rule plot_layer_memory:
    input:
        memory="results/memory/layers.json",
    output:
        png=report(
            "results/figures/layer_memory.png",
            caption="../report/layer_memory.rst",
            category="Cost",
        ),
        pdf="results/figures/layer_memory.pdf",
    log:
        "results/logs/plot_layer_memory.log",
    benchmark:
        "results/benchmarks/plot_layer_memory.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.layer_memory"),
    shell:
        "python -m paper_figures.layer_memory --memory {input.memory}"
        " --png {output.png} --pdf {output.pdf} > {log} 2>&1"


rule table_layer_memory:
    input:
        memory="results/memory/layers.json",
        paper=PAPER_VALUES,
    output:
        csv=report(
            "results/tables/layer_memory.csv",
            caption="../report/layer_memory.rst",
            category="Cost",
        ),
        markdown="results/tables/layer_memory.md",
    log:
        "results/logs/table_layer_memory.log",
    benchmark:
        "results/benchmarks/table_layer_memory.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.layer_memory_table"),
    shell:
        "python -m paper_figures.layer_memory_table --memory {input.memory} --paper {input.paper}"
        " --csv {output.csv} --markdown {output.markdown} > {log} 2>&1"


rule plot_step_memory:
    input:
        memory="results/memory/steps.json",
    output:
        png=report(
            "results/figures/step_memory.png",
            caption="../report/step_memory.rst",
            category="Cost",
        ),
        pdf="results/figures/step_memory.pdf",
    log:
        "results/logs/plot_step_memory.log",
    benchmark:
        "results/benchmarks/plot_step_memory.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.step_memory"),
    shell:
        "python -m paper_figures.step_memory --memory {input.memory}"
        " --png {output.png} --pdf {output.pdf} > {log} 2>&1"


rule plot_norm_error:
    input:
        errors="results/norm_error/errors.json",
    output:
        png=report(
            "results/figures/norm_error_vs_probes.png",
            caption="../report/norm_error_vs_probes.rst",
            category="Utility",
        ),
        pdf="results/figures/norm_error_vs_probes.pdf",
    log:
        "results/logs/plot_norm_error.log",
    benchmark:
        "results/benchmarks/plot_norm_error.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.norm_error_vs_probes"),
    shell:
        "python -m paper_figures.norm_error_vs_probes --errors {input.errors}"
        " --png {output.png} --pdf {output.pdf} > {log} 2>&1"


rule compare_paper:
    input:
        paper=PAPER_VALUES,
        metrics="results/summary/metrics.csv",
        flops="results/flops/layers.json",
        calibrations=separate_calibrations(),
        profiles=layer_profiles(),
        memory="results/memory/layers.json",
        noise="results/noise/paper_bbc.json",
        errors="results/norm_error/errors.json",
        envelope="results/envelope/cdf.json",
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
        inputs=inputs_note,
        configuration=lambda wildcards: config["name"],
        code=code_hash("paper_figures.compare_paper"),
    shell:
        "python -m paper_figures.compare_paper --configuration {params.configuration}"
        " --paper {input.paper} --metrics {input.metrics} --flops {input.flops}"
        " --calibrations {input.calibrations} --profiles {input.profiles}"
        " --memory {input.memory} --noise {input.noise} --errors {input.errors}"
        " --envelope {input.envelope}"
        " --csv {output.csv} --markdown {output.markdown} > {log} 2>&1"
