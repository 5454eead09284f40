rule table_complexity:
    input:
        flops="results/flops/layers.json",
        memory="results/memory/layers.json",
    output:
        csv=report(
            "results/tables/complexity.csv",
            caption="../report/complexity.rst",
            category="Cost",
        ),
        markdown="results/tables/complexity.md",
    log:
        "results/logs/table_complexity.log",
    benchmark:
        "results/benchmarks/table_complexity.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.complexity_table"),
    shell:
        "python -m paper_figures.complexity_table --flops {input.flops} --memory {input.memory}"
        " --csv {output.csv} --markdown {output.markdown} > {log} 2>&1"


rule table_efficiency:
    input:
        flops="results/flops/layers.json",
        memory="results/memory/layers.json",
        profiles=layer_profiles(),
        paper=PAPER_VALUES,
    output:
        csv=report(
            "results/tables/efficiency.csv",
            caption="../report/efficiency.rst",
            category="Cost",
        ),
        markdown="results/tables/efficiency.md",
    log:
        "results/logs/table_efficiency.log",
    benchmark:
        "results/benchmarks/table_efficiency.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.efficiency_table"),
    shell:
        "python -m paper_figures.efficiency_table --flops {input.flops} --memory {input.memory}"
        " --profiles {input.profiles} --paper {input.paper}"
        " --csv {output.csv} --markdown {output.markdown} > {log} 2>&1"


rule plot_layer_memory_time:
    input:
        profiles=layer_profiles(),
    output:
        png=report(
            "results/figures/layer_memory_time.png",
            caption="../report/layer_memory_time.rst",
            category="Cost",
        ),
        pdf="results/figures/layer_memory_time.pdf",
    log:
        "results/logs/plot_layer_memory_time.log",
    benchmark:
        "results/benchmarks/plot_layer_memory_time.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.layer_memory_time"),
    shell:
        "python -m paper_figures.layer_memory_time {input.profiles}"
        " --png {output.png} --pdf {output.pdf} > {log} 2>&1"


rule plot_long_context:
    input:
        flops="results/flops/layers.json",
        memory="results/memory/steps.json",
    output:
        png=report(
            "results/figures/long_context.png",
            caption="../report/long_context.rst",
            category="Cost",
        ),
        pdf="results/figures/long_context.pdf",
    log:
        "results/logs/plot_long_context.log",
    benchmark:
        "results/benchmarks/plot_long_context.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.long_context"),
    shell:
        "python -m paper_figures.long_context --flops {input.flops} --memory {input.memory}"
        " --png {output.png} --pdf {output.pdf} > {log} 2>&1"
