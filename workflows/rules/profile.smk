rule count_flops:
    output:
        flops="results/flops/layers.json",
    log:
        "results/logs/count_flops.log",
    benchmark:
        "results/benchmarks/count_flops.tsv"
    conda:
        "../../envs/training.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    params:
        layers=",".join(f"{d}x{p}" for d, p in config["flops"]["layers"]),
        tokens=config["flops"]["tokens"],
        num_probes=config["flops"]["num_probes"],
        code=code_hash("dprc.profiling.flops"),
    shell:
        "dprc count-flops --layers {params.layers} --tokens {params.tokens}"
        " --num-probes {params.num_probes} --out {output.flops} > {log} 2>&1"
