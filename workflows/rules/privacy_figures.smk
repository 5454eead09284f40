rule plot_noise_vs_probes:
    input:
        noise="results/noise/paper_bbc.json",
        paper=PAPER_VALUES,
    output:
        png=report(
            "results/figures/noise_vs_probes.png",
            caption="../report/noise_vs_probes.rst",
            category="Privacy",
        ),
        pdf="results/figures/noise_vs_probes.pdf",
    log:
        "results/logs/plot_noise_vs_probes.log",
    benchmark:
        "results/benchmarks/plot_noise_vs_probes.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.noise_vs_probes"),
    shell:
        "python -m paper_figures.noise_vs_probes --noise {input.noise} --paper {input.paper}"
        " --png {output.png} --pdf {output.pdf} > {log} 2>&1"


rule plot_noise_vs_epsilon:
    input:
        noise="results/noise/paper_bbc.json",
        paper=PAPER_VALUES,
    output:
        png=report(
            "results/figures/noise_vs_epsilon.png",
            caption="../report/noise_vs_epsilon.rst",
            category="Privacy",
        ),
        pdf="results/figures/noise_vs_epsilon.pdf",
    log:
        "results/logs/plot_noise_vs_epsilon.log",
    benchmark:
        "results/benchmarks/plot_noise_vs_epsilon.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.noise_vs_epsilon"),
    shell:
        "python -m paper_figures.noise_vs_epsilon --noise {input.noise} --paper {input.paper}"
        " --png {output.png} --pdf {output.pdf} > {log} 2>&1"


rule plot_noise_overhead:
    input:
        noise=noise_sweeps(),
    output:
        png=report(
            "results/figures/noise_overhead.png",
            caption="../report/noise_overhead.rst",
            category="Privacy",
        ),
        pdf="results/figures/noise_overhead.pdf",
    log:
        "results/logs/plot_noise_overhead.log",
    benchmark:
        "results/benchmarks/plot_noise_overhead.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.noise_overhead"),
    shell:
        "python -m paper_figures.noise_overhead {input.noise}"
        " --png {output.png} --pdf {output.pdf} > {log} 2>&1"


rule plot_envelope_cdf:
    input:
        envelope="results/envelope/cdf.json",
    output:
        png=report(
            "results/figures/envelope_cdf.png",
            caption="../report/envelope_cdf.rst",
            category="Privacy",
        ),
        pdf="results/figures/envelope_cdf.pdf",
    log:
        "results/logs/plot_envelope_cdf.log",
    benchmark:
        "results/benchmarks/plot_envelope_cdf.tsv"
    conda:
        "../../envs/figures.yaml"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        inputs=inputs_note,
        code=code_hash("paper_figures.envelope_cdf"),
    shell:
        "python -m paper_figures.envelope_cdf --envelope {input.envelope}"
        " --png {output.png} --pdf {output.pdf} > {log} 2>&1"
