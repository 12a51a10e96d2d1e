"""Seconds that candidates are expected to take to make, by the kernels that a compiler sees."""

from __future__ import annotations

from ridgeline.optimizer.search.facts import COMPILING_S, Facts, Proposal

TUNE_CPU_S = 120.0
"""Seconds of all processors together to try the ways to compute one product: BERT's four took over 80 s of four."""
FEW_S, FEW_KERNEL_S = 1.5, 0.25
"""Seconds to compile a function of a few kernels, and each of them. torch.compile took 1.3 s for problems of the first
level of KernelBench (median of 72; nine in ten below 2.9) and 2.7 for the second's (98; 5.8), a dozen others compiling
beside (H200)."""
CAPTURE_S, TRACE_S = 1.0, 2.0
TRACE_KERNEL_S, RACED_KERNEL_S = 0.004, 0.008
"""Tracing and rewriting, without any compiler: a decoding step of 1,690 kernels takes 8.0 s (H200, three others
compiling beside), Swin 6.3 (600), DiT 2.7 (655). Convolutions of ours are raced when they are first run: EfficientNet
8.8 s (362), U-Net 10.5 (1,019), ResNet-50 5.7 (391)."""
AGAIN_FRAC = 0.6
"""Of what torch.compile took, what compiling the same model another way takes: most kernels are on disk by then. Of 71
problems of KernelBench the median is 0.3, nine in ten are below 0.64 (H200)."""


class Prices:
    """Expected seconds, corrected by what compilers took on this host so far."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.scale = 1.0  # measured over estimated compile time
        self.import_s = facts.import_s
        self.stock_made = False

    def took(self, proposal: Proposal, spent_s: float) -> None:
        """Compilers are as slow as this host lets them be: the first tells; what tunes spends its time elsewhere."""
        if proposal.candidate.compiler in ("stock", "inductor") and proposal.cost_s > CAPTURE_S:
            self.scale, self.import_s = max(0.25, min(5.0, self.scale * spent_s / proposal.cost_s)), 0.0
            self.stock_made = self.stock_made or proposal.candidate.compiler == "stock"

    def compile_s(self, scope: str) -> float:
        """Seconds to compile: some anyway, some for every kernel, more for every kernel that is not like another.

        Measured on a host with a GPU: ResNet-50 21 s (404 kernels, all different), a decoding step of 32 equal layers
        36 s (1,700), eight layers of prefill 24 s (330), three others compiling beside. Where C++ is compiled, more; in
        training too: ResNet-50 44 s (813), GPT-2 medium 57 s (1,749). Training's blocks alone take less: Llama 1B's
        5.6 s (145 kernels), GPT-2's 6.8 (110), ViT-B's 4.3 (60), the four kinds of ConvNeXt 11.2 (270).
        """
        if scope == "blocks" and self.facts.mode == "train" and self.facts.cuda:
            first_s = 3.0 if self.facts.budget_s >= COMPILING_S else 6.0  # the compiler is imported with the first
            return self.scale * (first_s + 0.03 * self.kernels("blocks"))
        first_s, each_s, unlike_s = (6.0, 0.015, 0.03) if self.facts.cuda else (6.0, 0.02, 0.06)
        each_s *= 5 / 3 if self.facts.mode == "train" else 1
        many_s = first_s + each_s * self.kernels(scope) + unlike_s * self.kernels("blocks")
        if self.facts.mode == "train" or not self.facts.cuda:
            return self.scale * many_s
        few_s = FEW_S + FEW_KERNEL_S * self.kernels(scope) + self.import_s
        return self.scale * min(many_s, few_s)

    def whole_s(self) -> float:
        """Seconds to compile the whole model with a backend of ours: a trace of all, and equal blocks once."""
        if not self.facts.groups:
            return (AGAIN_FRAC if self.stock_made and self.facts.mode == "infer" else 1.0) * self.compile_s("model")
        return min(self.compile_s("model"), self.trace_s("model") + self.compile_s("blocks"))

    def tune_s(self) -> float:
        """Seconds to try the ways to compute every product."""
        return self.facts.num_products * TUNE_CPU_S / self.facts.num_threads

    def kernels(self, scope: str) -> float:
        """Kernels that a compiler sees: of equal blocks those of one."""
        return self.facts.num_kernels * (self.facts.unlike_frac if scope == "blocks" else 1.0)

    def trace_s(self, scope: str) -> float:
        if self.facts.mode == "train":  # kernels of a step, of which a tracer sees the forward's
            return TRACE_S + TRACE_KERNEL_S * self.kernels(scope)
        raced_s = RACED_KERNEL_S if self.facts.convolves else 0.0
        return TRACE_S + (TRACE_KERNEL_S + raced_s) * self.kernels(scope)
