"""Losses."""

from typing import Final

FUNCTIONS: Final[dict[str, str]] = {
    "mse_loss": "mse_loss",
    "l1_loss": "l1_loss",
    "smooth_l1_loss": "smooth_l1_loss",
    "huber_loss": "huber_loss",
    "soft_margin_loss": "soft_margin_loss",
    "binary_cross_entropy": "nn.functional.binary_cross_entropy",
    "binary_cross_entropy_with_logits": "nn.functional.binary_cross_entropy_with_logits",
    "kl_div": "nn.functional.kl_div",
    "cross_entropy": "cross_entropy",
    "nll_loss": "nll_loss",
    # What the losses of torch.nn.functional end in.
    "margin_ranking_loss": "_C._VariableFunctions.margin_ranking_loss",
    "hinge_embedding_loss": "_C._VariableFunctions.hinge_embedding_loss",
    "poisson_nll_loss": "_C._VariableFunctions.poisson_nll_loss",
    "cosine_embedding_loss": "_C._VariableFunctions.cosine_embedding_loss",
    "triplet_margin_loss": "_C._VariableFunctions.triplet_margin_loss",
    "ctc_loss": "_C._VariableFunctions.ctc_loss",
    "multi_margin_loss": "_C._nn.multi_margin_loss",
    "multilabel_margin_loss": "_C._nn.multilabel_margin_loss",
}

PRIMITIVES: Final[dict[str, str]] = {
    "mse_loss": "MSELossExt",
    "l1_loss": "L1LossExt",
    "smooth_l1_loss": "SmoothL1Loss",
    "kl_div": "KLDiv KLDivLoss",
    "soft_margin_loss": "SoftMarginLoss",
    "binary_cross_entropy": "BinaryCrossEntropy",
    "binary_cross_entropy_with_logits": "BCEWithLogitsLoss",
    "cross_entropy": "SparseSoftmaxCrossEntropyWithLogits",
    "nll_loss": "NLLLoss NLLLoss2d",
}
