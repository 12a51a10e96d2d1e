"""Expected build times of candidates, from the number of kernels that a compiler sees."""

from __future__ import annotations

from ridgeline.optimizer.search.facts import COMPILING_S, Facts, Proposal

CAPTURE_S = 1.0
AGAIN_FRAC = 0.6
"""Time to compile a model another way over what torch.compile took: most kernels are cached on disk by then. Of 71
problems of KernelBench the median is 0.3, nine in ten are below 0.64 (H200)."""


class Prices:
    """Expected seconds, scaled by what compilers took on this host so far."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.scale = 1.0  # measured over estimated compile time
        self.import_s = facts.import_s
        self.stock_made = False

    def took(self, proposal: Proposal, spent_s: float) -> None:
        """Update the scale with a measured build; candidates that tune say nothing about the compiler's speed."""
        if proposal.candidate.compiler in ("stock", "inductor") and proposal.cost_s > CAPTURE_S:
            self.scale, self.import_s = max(0.25, min(5.0, self.scale * spent_s / proposal.cost_s)), 0.0
            self.stock_made = self.stock_made or proposal.candidate.compiler == "stock"

    def compile_s(self, scope: str) -> float:
        """Seconds to compile: a constant, some per kernel, and more per distinct kernel.

        Measured on a host with a GPU, three others compiling beside: ResNet-50 21 s (404 kernels, all different), a
        decoding step of 32 equal layers 36 s (1,700), eight layers of prefill 24 s (330). C++ takes longer, and so does
        training: ResNet-50 44 s (813), GPT-2 medium 57 s (1,749). Training's blocks alone take less: Llama 1B's
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
        # A function of few kernels: torch.compile took 1.3 s for problems of KernelBench's first level (median of 72;
        # nine in ten below 2.9), 2.7 for the second's (98; 5.8), a dozen others compiling beside (H200).
        few_s = 1.5 + 0.25 * self.kernels(scope) + self.import_s
        return self.scale * min(many_s, few_s)

    def whole_s(self) -> float:
        """Seconds to compile the whole model with a backend of ours: one trace, and equal blocks once."""
        if not self.facts.groups:
            return (AGAIN_FRAC if self.stock_made and self.facts.mode == "infer" else 1.0) * self.compile_s("model")
        return min(self.compile_s("model"), self.trace_s("model") + self.compile_s("blocks"))

    def tune_s(self) -> float:
        """Seconds to benchmark every GEMM: BERT's four took over 80 s on four cores."""
        return self.facts.num_products * 120.0 / self.facts.num_threads

    def kernels(self, scope: str) -> float:
        """Kernels that a compiler sees; equal blocks count once."""
        return self.facts.num_kernels * (self.facts.unlike_frac if scope == "blocks" else 1.0)

    def trace_s(self, scope: str) -> float:
        """Seconds to trace and rewrite without a compiler.

        A decoding step of 1,690 kernels takes 8.0 s (H200, three others compiling beside), Swin 6.3 (600), DiT 2.7
        (655). Our convolutions are autotuned at their first run: EfficientNet 8.8 s (362), U-Net 10.5 (1,019),
        ResNet-50 5.7 (391).
        """
        raced_s = 0.008 if self.facts.convolves and self.facts.mode != "train" else 0.0
        return 2.0 + (0.004 + raced_s) * self.kernels(scope)
